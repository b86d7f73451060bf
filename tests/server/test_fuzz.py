"""Hostile strings and values through both frontends: whatever comes is served or refused.

A few seconds of it, over an engine without a model. `make fuzz` has more of it, over the model in
the box.
"""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import logging
import os
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.config.config_dict import config_from_config_dict
from jaxserve.configs import tiny_cpu
from jaxserve.engine.startup.build import build_engine
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.http.options import HttpSettings
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.server.server import Server
from tests.server import hostile
from tests.server.batches.serving import serving
from tests.server.fake_engine import PATIENCE, FakeEngine

MINUTES = float(os.environ.get("JAXSERVE_FUZZ_MINUTES", "0"))
MORE_MIB = 128 + 2 * MINUTES  # what the process may take more; most of it is hypothesis's own
GENERATE = "/jaxserve.v1.Generation/Generate"
BOUNDARY = "x" * 20
OURS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.tool_calls | tojson }}{% endfor %}"
    "{{ flag }}"
)


class Errors(logging.Handler):
    """What is logged of what the server did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@dataclass
class Target:
    """A server, and ways to it. limit_s: for an answer."""

    server: Server
    channel: grpc.Channel
    errors: Errors
    seen: dict[Any, int] = field(default_factory=dict)
    connection: http.client.HTTPConnection | None = None
    used: float = 0.0

    def send(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """One call, and what every answer has to be."""
        idle, self.used = time.monotonic() - self.used, time.monotonic()
        if self.connection is None or idle > 5:  # the server closes what is idle for long
            assert self.server.http_address is not None
            self.connection = http.client.HTTPConnection(self.server.http_address, timeout=PATIENCE)
        self.connection.request(method, path, body, {"Content-Type": kind})
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.will_close:
            self.connection.close()
            self.connection = None
        self._counted(answer.status, answer.status < 500, (method, path, body, text))
        is_json = (answer.getheader("content-type") or "").split(";")[0] == "application/json"
        found = json.loads(text) if is_json else None
        if answer.status >= 400:
            assert found is not None
            error = found["error"]
            if path == hostile.OLLAMA:
                assert isinstance(error, str)
                error = {"message": error}
            else:
                more = set() if path.startswith(hostile.MESSAGES) else {"param", "code"}
                assert set(error) == {"message", "type"} | more
            assert 0 < len(error["message"]) < 2000
        return answer.status, found

    def call(self, method: str, message: bytes) -> None:
        """The same over gRPC."""
        call = self.channel.unary_stream(f"/jaxserve.v1.{method}")(message, timeout=PATIENCE)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        code = call.code()
        self._counted(code, code not in OURS, (method, message, call.details()))
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED

    def _counted(self, key: Any, right: bool, what: Any) -> None:
        self.seen[key] = self.seen.get(key, 0) + 1
        logged, self.errors.found = self.errors.found, []
        assert right and not logged, (what, logged)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    if not MINUTES:
        yield FakeEngine().run()
        return
    engine = build_engine(config_from_config_dict(tiny_cpu.get_config()))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def target(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    template, errors = ChatTemplate(TEMPLATE), Errors()
    classes = {"offline": ServiceLevel(SLO(jct=60.0), Tier.BEST_EFFORT, "offline")}
    options: dict[str, Any] = {
        "http": HttpSettings(port=0, template=template, limits=SchedulerConfig(max_rows=16)),
        "slo_classes": classes,
        "options": ServerOptions(request_log=True),
    }
    logging.getLogger().addHandler(errors)
    with (
        serving(engine, tmp_path_factory.mktemp("batches"), max_bytes=1 << 24, **options) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield Target(server, channel, errors)
    logging.getLogger().removeHandler(errors)
    template.close()


def hammered(strategy: st.SearchStrategy[Any], examples: int, send: Callable[[Any], None]) -> None:
    """What comes of so many; with JAXSERVE_FUZZ_MINUTES of as many as fit a tenth of them."""

    @settings(
        max_examples=40 if MINUTES else examples,
        deadline=None,
        derandomize=not MINUTES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(drawn: Any) -> None:
        send(drawn)

    end = time.monotonic() + 60 * MINUTES / TESTS
    check()
    while time.monotonic() < end:
        check()


GENERATING = (hostile.COMPLETIONS, hostile.CHAT, hostile.MESSAGES, hostile.OLLAMA)
TESTS = 10  # below, but for those of what is left of it


@pytest.mark.promise(17)
@pytest.mark.parametrize("path", [*GENERATING, "/tokenize", "/detokenize"])
def test_hostile_bodies_are_served_or_refused(target: Target, path: str) -> None:
    examples = 50 if path in GENERATING else 15

    def send(raw: bytes) -> None:
        target.send("POST", path, raw)

    hammered(hostile.raw_bodies(path), examples, send)


def test_hostile_files_make_batches_whose_lines_fail_by_themselves(target: Target) -> None:
    def send(drawn: tuple[bytes, str, Any]) -> None:
        lines, name, metadata = drawn
        head = f'Content-Disposition: form-data; name="file"; filename="{name}"'.replace("\n", "")
        head = head.replace("\r", "").replace("\0", "")
        form = b"--%s\r\n%s\r\n\r\n%s\r\n--%s\r\n%s\r\n\r\nbatch\r\n--%s--\r\n" % (
            BOUNDARY.encode(),
            head.encode("utf-8", "surrogatepass"),
            lines,
            BOUNDARY.encode(),
            b'Content-Disposition: form-data; name="purpose"',
            BOUNDARY.encode(),
        )
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        status, file = target.send("POST", "/v1/files", form, kind)
        if status != 200:
            return
        asked = {"endpoint": hostile.COMPLETIONS, "completion_window": "24h", "metadata": metadata}
        asked["input_file_id"] = file["id"]
        status, batch = target.send("POST", "/v1/batches", json.dumps(asked).encode())
        if status == 200:
            count = sum(bool(each.strip()) for each in lines.split(b"\n"))
            assert batch["request_counts"]["total"] == count
            target.send("GET", f"/v1/files/{batch['id']}/content")
            for which in ("output", "errors"):
                target.send("GET", f"/v1/files/{batch['id']}-{which}/content")
            target.send("POST", f"/v1/batches/{batch['id']}/cancel", b"")
            target.send("DELETE", f"/v1/batches/{batch['id']}")
        target.send("DELETE", f"/v1/files/{file['id']}")

    names = hostile.TEXTS.filter(lambda text: '"' not in text and len(text) < 300)
    metadata = st.none() | st.dictionaries(hostile.TEXTS, hostile.TEXTS, max_size=3)
    hammered(st.tuples(hostile.batch_files(), names, metadata), 15, send)


PATHS = (
    *("/v1/models/", "/v1/files/", "/v1/batches/", "/"),
    *("/v1/batches?limit=1&after=", "/v1/files?after=", "/v1/files?limit="),
)


def test_hostile_paths_are_answered(target: Target) -> None:
    def send(drawn: tuple[str, str, str, str]) -> None:
        method, path, text, end = drawn
        quoted = urllib.parse.quote(text.encode("utf-8", "surrogatepass"), safe="")[:1500]
        target.send(method, path + (quoted or "x") + end)

    ends = st.sampled_from(["", "/content", "/cancel"])
    methods = st.sampled_from(["GET", "DELETE", "POST", "OPTIONS"])
    paths = st.sampled_from(PATHS)
    hammered(st.tuples(methods, paths, hostile.TEXTS, ends), 60, send)


@pytest.mark.promise(17)
@pytest.mark.parametrize("service", ["Generation", "Batches"])
def test_hostile_messages_are_served_or_refused(target: Target, service: str) -> None:
    methods = [each for each in hostile.METHODS if each.startswith(service)]
    drawn = st.sampled_from(methods).flatmap(
        lambda method: st.tuples(st.just(method), hostile.messages(method))
    )
    hammered(drawn, 50, lambda each: target.call(*each))


def test_what_is_left_of_it(target: Target, engine: Any) -> None:
    """The server answers, nothing was logged, and both frontends have served and refused some."""
    assert target.send("GET", "/health")[0] == 200
    for each in (200, 400, 404, grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT):
        assert target.seen.get(each), target.seen
    assert not target.errors.found


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="where memory is told otherwise")
def test_memory_is_given_back(target: Target) -> None:
    """Of bodies as long as are taken, of whatever is dear to parse."""
    large = [
        b'{"messages":[' + b"1," * 250_000 + b"1]}",
        b'{"messages":[' + b'{"role":"user","content":"a"},' * 20_000 + b"1]}",
        b"{" + b",".join(b'"a%d":1' % i for i in range(60_000)) + b"}",
        b'{"messages":[{"role":"user","content":"' + b"a" * 500_000 + b'"}]}',
    ]
    for raw in large:
        target.send("POST", hostile.CHAT, raw)
    gc.collect()
    before = _resident_mib()
    for _ in range(5):
        for raw in large:
            assert target.send("POST", hostile.CHAT, raw)[0] == 400
    gc.collect()
    assert _resident_mib() - before < MORE_MIB
