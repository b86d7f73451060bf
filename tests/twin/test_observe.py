"""`jaxserve observe` against a server, by sending and by listening."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.bench import cli as bench
from jaxserve.bench.http_target import Address, StreamedTokens
from jaxserve.bench.load_target import BenchError
from jaxserve.server.server import Server
from jaxserve.simulator import replay
from jaxserve.twin import server_facts
from jaxserve.twin.cli import main
from jaxserve.twin.proxy import MAX_BODY, Proxy
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = FakeEngine()
    with Server(engine, grace_s=0.0, http=SETTINGS) as server:
        engine.run()
        yield f"http://{server.http_address}"


def test_it_sends_a_workload_and_writes_what_it_saw(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "seen.jsonl"
    argv = [f"--url={url}/v1", "--workload=fixed:9x5x16", "--rate=40,60", f"--out={out}", "--json"]
    assert main(argv) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["model"], said["requests"]) == ("fake", 32)
    recording = replay.read(out)
    assert len(recording.arrivals) == 32
    assert {one.prompt_len for one in recording.arrivals.values()} == {9}
    assert {one.tokens for one in recording.ends.values()} == {5}
    assert not recording.notes and recording.header.max_model_len == 4096


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--workload=fixed:9x5x8"], "required: --url"),
        (["--url=ftp://x", "--workload=fixed:9x5x8"], "must be a URL"),
        (["--url=URL"], "--workload or --listen"),
        (["--url=URL", "--workload=sharegpt", "--listen=9"], "does not go with --listen"),
        (["--url=URL", "--workload=sharegpt", "--minutes=1"], "--minutes is for --listen"),
        (["--url=URL", "--workload=sharegpt", "--rate=0"], "must be from"),
        (["--url=URL", "--workload=sharegpt", "--listen=70000"], "at most 65535"),
        (["--url=URL", "--workload=sharegpt", "--vocabulary=3"], "more than 3"),
        (["--url=URL", "--workload=nothing"], "there is no workload or file"),
        (["--url=URL", "--workload=fixed:9x5x8", "--model=mine"], "the server has fake"),
        (["--url=URL", "--workload=fixed:9000x5x8"], "serves at most 4096"),
        (["--url=http://127.0.0.1:1", "--workload=fixed:9x5x8"], "no answer from"),
    ],
)
def test_what_is_wrong_is_one_line(
    argv: list[str], says: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [one.replace("=URL", f"={url}") for one in argv]
    try:
        code = main([*argv, f"--out={tmp_path / 'out'}"])
    except SystemExit as end:
        code = int(end.code or 0)
    assert code in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert says in " ".join(said) and len(said) <= 2


def call(address: str, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    method = "GET" if body is None else "POST"
    sent = None if body is None else json.dumps(body)
    connection.request(method, path, sent, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_a_proxy_passes_on_what_it_sees(url: str) -> None:
    """Byte for byte what the server says itself, but for what differs from call to call."""
    with Proxy(Address.parse(url)) as proxy:
        there, here = url.removeprefix("http://"), proxy.url.removeprefix("http://")
        assert call(here, "/v1/models", None) == call(there, "/v1/models", None)
        asked = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}
        through, direct = (
            call(here, "/v1/completions", asked),
            call(there, "/v1/completions", asked),
        )
        assert through[0] == direct[0] == 200
        assert _said(through[1]) == _said(direct[1])
        usage = {"stream_options": {"include_usage": True}}
        through = call(here, "/v1/completions", asked | usage)
        assert b'"usage"' in through[1].splitlines()[-4]
        assert call(here, "/v1/completions", asked | {"stream": False})[0] == 200
        assert call(here, "/v1/completions", asked | {"max_tokens": 10**9})[0] == 400
        seen = proxy.seen()
    assert [(one.prompt, len(one.times), one.limit) for one in seen] == [(3, 4, 4)] * 2
    assert (proxy.unseen, proxy.failed) == (1, 0)


def _said(body: bytes) -> str:
    """All events' texts, and other lines: a busy server may say several tokens in one event."""
    found = ""
    for line in filter(None, body.splitlines()):
        data = line.removeprefix(b"data: ")
        if data.startswith(b"{"):
            found += "".join(one["text"] for one in json.loads(data)["choices"])
        else:
            found += line.decode()
    return found


def test_a_proxy_refuses_what_it_could_not_hold(url: str) -> None:
    with Proxy(Address.parse(url)) as proxy:
        here = proxy.url.removeprefix("http://")
        status, _ = call(here, "/v1/completions", {}, **{"Content-Length": str(MAX_BODY + 1)})
        assert status == 413
        assert call(here, "/v1/completions", {}, **{"Content-Length": "9" * 400})[0] == 413
        assert call(here, "/v1/models", None)[0] == 200


def test_a_proxy_before_nobody_says_so() -> None:
    with Proxy(Address.parse("http://127.0.0.1:1")) as proxy:
        assert call(proxy.url.removeprefix("http://"), "/v1/models", None)[0] == 502
    assert proxy.failed == 1


def test_a_client_that_goes_harms_nobody(url: str) -> None:
    with Proxy(Address.parse(url)) as proxy:
        here = proxy.url.removeprefix("http://")
        gone = http.client.HTTPConnection(here, timeout=60)
        asked = {"prompt": [1], "max_tokens": 4000, "stream": True}
        gone.request("POST", "/v1/completions", json.dumps(asked))
        gone.getresponse().readline()
        gone.close()
        assert call(here, "/v1/models", None)[0] == 200
    assert not [one for one in threading.enumerate() if one.name.startswith("Proxy")]


@pytest.mark.parametrize(
    "line",
    [
        b"data: 5",
        b"data: []",
        b'data: {"choices": 3}',
        b'data: {"choices": [3]}',
        b'data: {"usage": "x"}',
        b'data: {"usage": {"prompt_tokens": "x"}}',
        b'data: {"usage": {"prompt_tokens": 1e999}}',
        b'data: {"usage": {"prompt_tokens": %s}}' % (b"9" * 400),
        b'data: {"usage": {"completion_tokens": 1000000000}}',
        b'data: {"usage": {"completion_tokens": -1}}',
        b"data: " + b"[" * 100_000,
        b"data: \xff",
        b'data: {"error": {"message": "busy"}}',
    ],
)
def test_an_event_of_another_kind_is_an_error(line: bytes) -> None:
    tokens = StreamedTokens()
    assert tokens.take(line) == 0 and tokens.error and len(tokens.error) < 400


def test_tokens_are_counted_with_usage_and_without() -> None:
    plain, counted = StreamedTokens(), StreamedTokens()
    event = b'data: {"choices": [{"text": "a b"}]}'
    assert [plain.take(event), plain.take(b""), plain.take(event)] == [1, 0, 1]
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}'
    assert plain.take(usage) == 3 and plain.only_usage and plain.prompt == 7
    each = b'data: {"choices": [{"text": ""}], "usage": {"completion_tokens": %d}}'
    assert [counted.take(each % n) for n in (2, 2, 3)] == [2, 0, 1]
    assert counted.take(b"data: [DONE]") == 0 and counted.ended
    chat = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
    assert StreamedTokens().take(chat) == 0


def test_what_servers_say_of_themselves() -> None:
    vllm = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="2731",engine="0"} 1.0\n'
    assert server_facts.of_metrics(vllm) == ({"kv_tokens": 16 * 2731}, "vllm:")
    sglang = 'sglang:max_total_num_tokens{model_name="m"} 471258.0\n'
    assert server_facts.of_metrics(sglang) == ({"kv_tokens": 471258}, "sglang:")
    props = {"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}}
    known = {"max_rows": 4, "max_model_len": 2048, "kv_tokens": 8192}
    assert server_facts.of_props(json.dumps(props).encode()) == (known, "llama.cpp")


@pytest.mark.parametrize(
    "text",
    [
        *("", "no metrics {", 'vllm:cache_config_info{block_size="x"} 1\n'),
        "sglang:max_total_num_tokens +Inf\n",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % ("9" * 5000),
    ],
)
def test_metrics_that_say_nothing(text: str) -> None:
    assert server_facts.of_metrics(text) == ({}, "")
    assert server_facts.of_props(text.encode()) == ({}, "")


@pytest.mark.parametrize(
    "url", ["", "http://", "http://x:99999", "http://x:y", "http://x?a=1", "a b"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(BenchError, match="must be a URL"):
        Address.parse(url)


@pytest.mark.slow
def test_a_twin_at_other_rates(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["twin", f"--url={url}", "--fit=40,60", "--workload=alpaca", "--num_requests=60"]
    assert bench.main([*argv, "--predict=40,50"]) == 2
    assert bench.main([*argv, "--predict=50", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (point,) = found["points"]
    assert point["rate"] == 50 and all(min(point["TTFT"][what]) > 0 for what in ("mean", "p99"))
