"""`jaxserve.client`: the class, the command line, and what it says of who calls."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.client import Client, Tls, make_request
from jaxserve.client.cli import complete
from jaxserve.client.connection import key_metadata
from jaxserve.sched.request import SLO, Grammar, Tier
from jaxserve.server.server import Server
from tests.server.fake_engine import INFO, FakeEngine


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where connections are refused: bound, and nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def test_one_prompt_is_streamed_to_stdout(
    server: Server, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    assert complete([f"--address={server.address}", "Once upon", "--max_tokens=3"]) == 0
    assert capsys.readouterr().out == "Once upon w0 w1 w2\n"


def test_what_is_served_is_shown(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete([f"--address={server.address}", "--info"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["model"] == INFO.model and shown["num_blocks"] == str(INFO.num_blocks)
    assert shown["cost_model"] == INFO.cost_model


def test_several_continuations_are_numbered(
    server: Server, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    assert complete([f"--address={server.address}", "hi", "--max_tokens=1", "--n=2"]) == 0
    assert capsys.readouterr().out == "[0] hi w0\n[1] hi w0\n"


def test_every_flag_reaches_the_engine(
    server: Server, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    sampling = {
        "max_tokens": 4,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 7,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logprobs": 1,
        "prompt_logprobs": 1,
        "n": 2,
    }
    flags = [f"--{name}={number}" for name, number in sampling.items()]
    flags += ["--stop=a", "--stop=b", "--stop_token_id=5", "--ignore_eos", "--logit_bias=9:-1.5"]
    flags += ["--deterministic"]
    flags += ["--tier=best_effort", "--ttft_ms=100", "--tbt_ms=10", "--jct_ms=1000"]
    flags += ["--max_tbt_ms=700", "--cache_salt=me", "--prompt_cache_key=k", "--prediction=so"]
    assert complete([f"--address={server.address}", "hi", *flags]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 * (1 + 4 + 1), "log-probabilities, one a token, and a verdict"
    assert told[0] == "105:-13.1250  106:-13.2500", "of the prompt's second token"
    (request,) = engine.requests
    for name, number in sampling.items():
        assert getattr(request.sampling, name) == number
    assert request.sampling.stop == ("a", "b")
    assert request.sampling.stop_token_ids == (5,)
    assert request.sampling.ignore_eos and request.sampling.deterministic
    assert request.sampling.logit_bias == ((9, -1.5),)
    assert request.tier is Tier.BEST_EFFORT
    assert request.slo == SLO(0.1, 0.01, 1.0, 0.7)
    assert request.cache_salt == "me"
    assert not request.prediction, "nobody drafts here, so it is not encoded"
    key = "--prompt_cache_key=" + "k" * 257  # which the server alone looks at
    assert complete([f"--address={server.address}", "hi", key]) == 1
    assert "prompt_cache_key: has 257 characters" in capsys.readouterr().err


def test_flags_hold_the_text_to_a_grammar(
    server: Server, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.run()
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "boolean"}')
    for flags, grammar in (
        (['--json_schema={"type": "integer"}'], Grammar.json_schema('{"type": "integer"}')),
        ([f"--json_schema=@{schema}"], Grammar.json_schema('{"type": "boolean"}')),
        (["--json_object"], Grammar.json_object()),
        (["--regex=a+"], Grammar.regex("a+")),
        (["--choice=yes", "--choice=no"], Grammar.choice(["yes", "no"])),
    ):
        assert complete([f"--address={server.address}", "hi", "--max_tokens=1", *flags]) == 0
        assert engine.requests[-1].sampling.grammar == grammar


def test_a_grammar_that_cannot_be_is_one_clear_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, binary = tmp_path / "absent.json", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    to = f"--address={server.address}"
    assert complete([to, "hi", f"--json_schema=@{absent}"]) == 1
    assert capsys.readouterr().err == f"jaxserve complete: {absent}: No such file or directory\n"
    assert complete([to, "hi", "--regex=bad"]) == 1
    assert "grammar.regex: is bad" in capsys.readouterr().err
    for wrong, problem in (
        ([f"--json_schema=@{binary}"], f"--json_schema: {binary} is not UTF-8"),
        (["--regex=a", "--json_object"], "--json_object: not allowed with argument --regex"),
    ):
        with pytest.raises(SystemExit):
            complete([to, "hi", *wrong])
        assert problem in capsys.readouterr().err


def test_a_file_of_prompts_gives_json_lines_in_its_order(
    server: Server, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    prompts = [f"prompt {i}" for i in range(40)]
    source, target = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n\n".join(prompts))
    flags = [f"--file={source}", f"--out={target}", "--max_tokens=2", "--logprobs=1"]
    flags += ["--prompt_logprobs=0"]
    assert complete([f"--address={server.address}", *flags]) == 0
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [record["prompt"] for record in records] == prompts
    (completion,) = records[7]["completions"]
    assert completion["text"] == " w0 w1"
    assert completion["token_ids"] == [100, 101]
    assert completion["finish_reason"] == "length"
    counts = {"prompt_tokens": 8, "output_tokens": 2, "preemptions": 1, "cached_tokens": 0}
    drafts = {"accepted_draft_tokens": 0, "rejected_draft_tokens": 0}
    assert completion["usage"] == counts | drafts
    assert completion["timings"]["ttft_ms"] == 200
    assert completion["logprobs"][0] == {"token_id": 100, "logprob": -0.5, "top": [[100, -0.5]]}
    assert [entry["token_id"] for entry in completion["prompt_logprobs"]] == [*map(ord, "rompt 7")]
    assert "40/40" in capsys.readouterr().err


def test_a_refused_prompt_of_a_file_is_recorded_and_the_others_go_on(
    server: Server, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.run()
    source = tmp_path / "prompts.txt"
    source.write_text(f"one\n{'x' * 5000}\nthree\n")
    assert complete([f"--address={server.address}", f"--file={source}", "--max_tokens=1"]) == 1
    captured = capsys.readouterr()
    first, second, third = map(json.loads, captured.out.splitlines())
    assert first["completions"] and third["completions"]
    assert second["error"]["code"] == "INVALID_ARGUMENT"
    assert "5000" in second["error"]["message"]
    assert "1 of 3 prompts failed" in captured.err


def test_nobody_there_is_one_clear_line(
    nobody: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("one\ntwo\n")
    problem = f"no server answers at {nobody}: is it running? (jaxserve serve)"
    for given in ("hi", f"--file={source}"):
        assert complete([f"--address={nobody}", given]) == 1
        assert capsys.readouterr().err == f"jaxserve complete: {problem}\n"


def test_a_refusal_is_one_clear_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete([f"--address={server.address}", "hi", "--temperature=-1"]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("jaxserve complete: temperature: must be at least 0")
    assert error.count("\n") == 1


def test_a_file_that_is_missing_or_no_text_is_one_clear_line(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(b"\xff\xfe\x00")
    for file, says in (("/no/such", "No such file or directory"), (path, "is not UTF-8")):
        assert complete([f"--address={server.address}", f"--file={file}"]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"jaxserve complete: {file}") and says in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter 'temprature'.*temperature"),
        ({"slo": {"ttft": 1.0}}, "unknown slo 'ttft'.*ttft_ms"),
        ({"tier": "gold"}, "tier: unknown value 'gold'.*best_effort"),
    ],
)
def test_names_that_do_not_exist(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_request("hi", **options)


def test_none_leaves_the_servers_default() -> None:
    plain = make_request("hi")
    assert make_request("hi", temperature=None, stop=None, slo={"ttft_ms": None}) == plain


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], ""),
        (["hi", "--file=x"], ""),
        (["hi", "--info"], ""),
        (["--info", "--file=x"], ""),
        (["hi", "--tier=gold"], "gold"),
        (["hi", "--logit_bias=5"], "logit_bias"),
        (["hi", "--max=3"], "--max"),
        (["hi", "--out=x"], "--out goes with --file"),
        (["hi", "--concurrency=2"], "goes with --file"),
        (["--file=x", "--concurrency=0"], "at least 1, got 0"),
        (["hi", "--max_tokens=3000000000"], "max_tokens: "),
        (["hi", "--seed=-99999999999999999999"], "seed: "),
    ],
)
def test_usage_is_two_lines(
    flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        complete(["--address=localhost:1", *flags])
    assert caught.value.code == 2
    problem, _ = capsys.readouterr().err.splitlines()
    assert complaint in problem


SENT = (("authorization", "Bearer mine"),)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAXSERVE_API_KEY", raising=False)


def test_the_key_is_the_environment_s_unless_another_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert key_metadata(None, "localhost:1", None) == ()
    monkeypatch.setenv("JAXSERVE_API_KEY", "mine\n")
    assert key_metadata(None, "localhost:1", None) == SENT
    monkeypatch.setenv("JAXSERVE_API_KEY", "another")
    assert key_metadata("mine", "localhost:1", None) == SENT
    assert key_metadata("", "localhost:1", None) == ()


@pytest.mark.parametrize("key", ["a b", "ä", "a\nb", "a\x00"])
def test_what_no_key_is_is_not_sent(key: str) -> None:
    with pytest.raises(ValueError, match="the API key: must be printable ASCII") as error:
        Client("localhost:1", api_key=key)
    assert key not in str(error.value)


@pytest.mark.parametrize(
    ("address", "tls", "warns"),
    [
        ("localhost:1", None, False),
        ("127.0.0.1:1", None, False),
        ("[::1]:1", None, False),
        ("unix:/socket", None, False),
        ("192.0.2.1:1", None, True),
        ("box:1", None, True),
        ("box:1", Tls(), False),
    ],
)
def test_a_key_that_leaves_the_machine_in_the_clear_is_one_line(
    address: str, tls: Tls | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Client(address, api_key="mine", tls=tls).close()
    line = f"the API key goes to {address} in the clear: there is no TLS"
    assert caplog.messages == ([line] if warns else [])
    caplog.clear()
    Client(address, tls=tls).close()
    assert caplog.messages == []


def test_half_of_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a certificate and its key go together"):
        Client("box:1", tls=Tls(cert=tmp_path / "cert"))
    with pytest.raises(OSError, match="No such file"):
        Client("box:1", tls=Tls(ca=tmp_path / "none"))
