"""Ollama's API, with its client and without."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from jaxserve.sched.request import SLO
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server.fake_engine import INFO, FakeEngine
from tests.server.http.conftest import SETTINGS, Plain
from tests.server.http.openai.test_reasoning import QWEN
from tests.server.http.openai.test_reasoning import says as thinks
from tests.server.http.openai.test_tools import CALL, CITY, TOOLS, pieces, says

ASK: Any = [{"role": "user", "content": "How is it in Rome?"}]
USE = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.fixture
def client(server: Server) -> ollama.Client:
    return ollama.Client(host=f"http://{server.http_address}")


@pytest.fixture
def thinking(engine: FakeEngine) -> Iterator[ollama.Client]:
    """Of a server whose model has a template, and thinks."""
    template = ChatTemplate(QWEN)
    with Server(engine.run(), http=dataclasses.replace(SETTINGS, template=template)) as server:
        yield ollama.Client(host=f"http://{server.http_address}")
    template.close()


def prompt_of(engine: FakeEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt))


def lines(plain: Plain, path: str, **fields: Any) -> list[dict[str, Any]]:
    connection = plain.connect()
    connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.getheader("content-type") == "application/x-ndjson"
    found = [json.loads(line) for line in answer.read().splitlines()]
    connection.close()
    return found


def test_a_chat_whole_and_streamed(client: ollama.Client, running: FakeEngine) -> None:
    says(running, "It is", " fine.")
    whole = client.chat("fake:latest", ASK, options={"temperature": 0, "num_ctx": 4096})
    assert whole.message.content == "It is fine." and whole.message.role == "assistant"
    assert (whole.model, whole.done, whole.done_reason) == ("fake", True, "stop")
    assert whole.prompt_eval_count == len(running.requests[-1].prompt) and whole.eval_count == 2
    assert whole.total_duration == 300_000_000 and whole.eval_duration == 100_000_000
    assert running.requests[-1].sampling.temperature == 0
    *parts, last = client.chat("fake", ASK, stream=True, keep_alive="5m")
    assert "".join(part.message.content or "" for part in parts) == "It is fine."
    assert not any(part.done for part in parts) and not last.message.content
    assert (last.done_reason, last.eval_count) == ("stop", 2)


def test_an_agent(client: ollama.Client, running: FakeEngine) -> None:
    messages: list[Any] = list(ASK)
    for stream in (False, True):
        says(running, *pieces(f"Let me see. {CALL}{CALL}", 9))
        if stream:
            parts = list(client.chat("fake", messages, tools=TOOLS, stream=True))
            calls = [call for part in parts for call in part.message.tool_calls or ()]
            text = "".join(part.message.content or "" for part in parts)
            message: Any = {"role": "assistant", "content": text, "tool_calls": calls}
        else:
            message = client.chat("fake", messages, tools=TOOLS).message
            calls, text = list(message.tool_calls or ()), message.content or ""
        assert text == "Let me see."
        assert [dict(call.function.arguments) for call in calls] == [{"city": "Rome"}] * 2
        messages.append(message)
        messages += [
            {"role": "tool", "tool_name": "weather", "content": f"Sun {n}, {stream}"}
            for n in range(2)
        ]
    says(running, "Fine.")
    assert client.chat("fake", messages, tools=TOOLS).message.content == "Fine."
    prompt = prompt_of(running)
    assert prompt.count('"arguments": {"city": "Rome"}') == 4
    assert "Sun 0, False" in prompt and "Sun 1, True" in prompt


def test_results_have_the_ids_of_their_calls(plain: Plain, running: FakeEngine) -> None:
    first, second = ({"function": {"name": name, "arguments": {}}} for name in "fg")
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [first, second, {**first, "id": "mine"}]},
        {"role": "tool", "tool_name": "g", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "tool_call_id": "mine", "content": "3"},
    ]
    lines(plain, "/api/chat", messages=turns, options={"num_predict": 2})
    ids = [("tool", call_id) for call_id in ("mine", "call00000", "call00001")]
    assert list(running.requests[-1].continues) == ids


def test_thoughts(thinking: ollama.Client, engine: FakeEngine) -> None:
    thinks(engine, "<think>\nHm. So.\n</think>\n\nFine.")
    whole = thinking.chat("fake", ASK, think=True)
    assert (whole.message.thinking, whole.message.content) == ("Hm. So.", "Fine.")
    parts = list(thinking.chat("fake", ASK, think="high", stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == "Hm. So."
    assert "".join(part.message.content or "" for part in parts) == "Fine."
    thinking.chat("fake", [*ASK, whole.message, *ASK])
    assert "<think>\nHm. So.\n</think>" in prompt_of(engine)
    thinks(engine, "Fine.")
    thinking.chat("fake", ASK, think=False)
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    made = thinking.generate("fake", "Rome?", system="Be brief.")
    assert made.response == "Fine."
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    thinking.generate("fake", "Rome?", raw=True)
    assert prompt_of(engine) == "Rome?"
    assert "thinking" in (thinking.show("fake").capabilities or ())


def test_a_prompt_is_continued_without_a_template(
    client: ollama.Client, running: FakeEngine
) -> None:
    made = client.generate("fake", "Once", options={"num_predict": 3, "stop": ["zz"], "seed": 7})
    assert (made.response, made.done_reason, made.eval_count) == (" w0 w1 w2", "length", 3)
    assert prompt_of(running) == "Once"
    sampling = running.requests[-1].sampling
    assert (sampling.stop, sampling.seed, sampling.max_tokens) == (("zz",), 7, 3)
    parts = list(client.generate("fake", "Once", stream=True, options={"num_predict": -1}))
    assert sum(part.done or False for part in parts) == 1
    assert running.requests[-1].sampling.max_tokens == INFO.max_model_len - len("Once")
    client.generate("fake", "Once", options={"num_predict": 10**6, "repeat_penalty": 1.5})
    assert running.requests[-1].sampling.repetition_penalty == 1.5


def test_structured_output(client: ollama.Client, running: FakeEngine) -> None:
    client.chat("fake", ASK, format=CITY, options={"num_predict": 2})
    grammar = running.requests[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["city"]
    client.generate("fake", "a", format="json", options={"num_predict": 2})
    assert running.requests[-1].sampling.grammar is not None


def test_an_empty_prompt_loads_the_model(plain: Plain, engine: FakeEngine) -> None:
    for path, fields, reason in (
        ("/api/generate", {"model": "fake"}, "load"),
        ("/api/chat", {"messages": []}, "load"),
        ("/api/generate", {"keep_alive": 0}, "unload"),
    ):
        status, answer, _ = plain.call("POST", path, fields)
        assert (status, answer["done"], answer["done_reason"]) == (200, True, reason)
    assert not engine.requests


def test_vectors(client: ollama.Client, running: FakeEngine) -> None:
    made = client.embed("fake", ["a", "bcd"])
    assert len(made.embeddings) == 2 and len(made.embeddings[0]) == INFO.d_model
    assert (made.model, made.prompt_eval_count) == ("fake", 4)
    assert len(client.embed("fake", "a", dimensions=2).embeddings[0]) == 2


def test_models(client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == "fake" and model.size == 4 * INFO.num_params and model.digest
    assert [each.model for each in client.ps().models] == ["fake"]
    shown = client.show("fake:latest")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["none.context_length"] == INFO.max_model_len


def test_targets_come_in_headers_or_fields(plain: Plain, running: FakeEngine) -> None:
    *_, last = lines(plain, "/api/chat", messages=ASK, slo={"ttft_ms": 900},
                     options={"num_predict": 2})  # fmt: skip
    assert last["slo"]["met"] is True and last["timings"]["ttft_ms"] == 200
    assert running.requests[-1].slo == SLO(ttft=0.9)


def test_given_up_targets_are_told_once(plain: Plain, engine: FakeEngine) -> None:
    engine.gives_up = True
    engine.run()
    found = lines(plain, "/api/chat", messages=ASK, slo={"ttft_ms": 1}, options={"num_predict": 3})
    told = [line["slo"] for line in found[:-1] if "slo" in line]
    assert told == [{"expected": "missed"}]


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("chat", {"model": "llama3"}, 404, "there is no model 'llama3' here"),
    ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400,
     "messages.0.images: images are not served, only text"),
    ("chat", {"messages": [{"role": "developer", "content": "a"}]}, 400, "messages.0.role: must"),
    ("chat", {"messages": ASK, "options": {"num_predict": 0}}, 400,
     "options.num_predict: must be at least 1"),
    ("chat", {"messages": ASK, "options": {"top_k": -2}}, 400, "options.top_k: must be at least 0"),
    ("chat", {"messages": ASK, "options": {"seed": 10**400}}, 400, "options.seed: "),
    ("chat", {"messages": ASK, "options": {"mirostat": 2}}, 400, "options.mirostat: must be 0"),
    ("chat", {"messages": ASK, "options": {"tfs_z": 0.5}}, 400, "options.tfs_z: this server has"),
    ("chat", {"messages": ASK, "format": "xml"}, 400, "format: must be 'json', or a JSON Schema"),
    ("chat", {"messages": ASK, "format": {"type": "bad"}}, 400, "format: is bad"),
    ("chat", {"messages": ASK, "think": "much"}, 400, "think: "),
    ("chat", {"messages": ASK, "logprobs": True}, 400, "logprobs: this server has no such field"),
    ("chat", {"messages": [{"role": "user", "content": "a" * 5000}]}, 400, "messages: has 50"),
    ("generate", {"prompt": "a" * 5000}, 400, "prompt: has 5000 tokens"),
    ("generate", {"prompt": "a", "suffix": "b"}, 400, "suffix: must be ''"),
    ("generate", {"prompt": "a", "raw": True, "system": "b"}, 400, "system: needs a template"),
    ("generate", {"prompt": "a", "context": [1]}, 400, "context: has 1 entries; at most 0"),
    ("embed", {"input": []}, 400, "input: has no prompts"),
    ("embed", {"input": "a", "truncate": True}, 400, "truncate: must be False"),
    ("show", {"model": "x"}, 404, "there is no model 'x' here"),
    ("pull", {"model": "x"}, 404, "there is no POST /api/pull"),
]  # fmt: skip


@pytest.mark.promise(16)
@pytest.mark.parametrize(("path", "fields", "status", "says_so"), WRONG, ids=range(len(WRONG)))
def test_a_field_that_is_wrong_is_named(
    refusing: tuple[Plain, FakeEngine], path: str, fields: dict[str, Any], status: int, says_so: str
) -> None:
    plain, engine = refusing
    got, answer, _ = plain.call("POST", f"/api/{path}", fields)
    assert got == status and set(answer) == {"error"}, answer
    assert says_so in answer["error"]
    assert not engine.requests and not engine.live


def test_a_failure_is_a_line(plain: Plain, engine: FakeEngine) -> None:
    connection = plain.connect()
    body = json.dumps({"messages": ASK})
    connection.request("POST", "/api/chat", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    engine.wait(lambda: engine.live)
    engine.step()
    engine.fail(RuntimeError("broken"))
    assert json.loads(answer.read().splitlines()[-1]) == {"error": "broken"}
    connection.close()


def test_hanging_up_cancels(plain: Plain, engine: FakeEngine) -> None:
    for path, fields in (("/api/chat", {"messages": ASK}), ("/api/generate", {"prompt": "a"})):
        for stream in (False, True):
            connection = plain.connect()
            body = json.dumps({**fields, "stream": stream})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            engine.wait(lambda: engine.live)
            connection.close()
            engine.wait(lambda: not engine.live)
