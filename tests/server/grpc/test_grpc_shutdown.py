"""Stopping: no new calls, the running ones get their grace, the process exits 0."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import Call, Client, ServerError
from jaxserve.config import Config, ConfigError
from jaxserve.engine.errors import HostLost
from jaxserve.server.requests.options import server_options
from jaxserve.server.server import Server
from jaxserve.server.startup import process
from jaxserve.server.telemetry.logs import log_to_stderr
from tests.server.fake_engine import FakeEngine
from tests.server.logging_kept import logging_kept
from tests.server.processes import ROOT, serve_command

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE = 60


class Scene:
    """What plays while the server has the main thread: its engine, a client, and signals."""

    def __init__(self, server: Server, engine: FakeEngine) -> None:
        self.engine, self.client = engine, Client(server.address)
        self._health = grpc.insecure_channel(server.address)
        stub = health_pb2_grpc.HealthStub(self._health)
        self._watch = stub.Watch(health_pb2.HealthCheckRequest())

    def generate(self, **options: Any) -> Call:
        """Of which the first token has come."""
        stream = self.client.generate("hi", **options)
        self.step()
        assert next(stream).text == " w0"
        return stream

    def step(self) -> None:
        self.engine.wait(lambda: self.engine.live)
        self.engine.step()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(os.getpid(), number)

    def wait_not_serving(self) -> None:
        assert any(status.status == NOT_SERVING for status in self._watch)

    def close(self) -> None:
        self.client.close()
        self._health.close()


Played = Callable[..., int]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Runs a server in this process as `jaxserve serve` does; its exit code. Where the process
    would end at once, it goes on."""
    monkeypatch.setattr(process, "raise_limit", lambda: None)
    monkeypatch.setattr(process, "end_process", lambda code: None)

    def play(act: Callable[[Scene], None], grace_s: float = 1000.0, **fields: str) -> int:
        engine, errors, threads = FakeEngine(), list[BaseException](), list[threading.Thread]()
        ports = {"server__port": 0, "server__metrics_port": -1, "server__grace_s": grace_s}
        config = Config().with_fields(**{**ports, "server__exit_on_failure": "off", **fields})

        def whole(server: Server) -> None:
            scene = Scene(server, engine)
            try:
                act(scene)
            except BaseException as error:
                errors.append(error)
                server.request_stop()
                server.cancel_running()
            scene.close()

        def on_ready(server: Server) -> None:
            threads.append(threading.Thread(target=whole, args=(server,)))
            threads[0].start()

        code = process.run_server(engine, config, server_options(config), on_ready)
        threads[0].join(PATIENCE)
        for error in errors:
            raise error
        return code

    return play


@contextmanager
def hangup(handler: signal.Handlers) -> Iterator[None]:
    """What becomes of SIGHUP for whoever does not take it."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def ended(stream: Call, says: str, code: str = "UNAVAILABLE") -> ServerError:
    with pytest.raises(ServerError, match=says) as error:
        list(stream)
    assert error.value.code == code
    return error.value


@pytest.mark.promise(21)
def test_sigterm_finishes_what_runs_says_so_and_ends_with_0(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    def act(scene: Scene) -> None:
        stream = scene.generate(max_tokens=2)
        scene.signal()
        scene.wait_not_serving()
        assert ended(scene.client.generate("hi", timeout=PATIENCE), "shutting down").retry_s
        scene.step()
        (last,) = stream
        assert last.text == " w1" and last.finish.usage.output_tokens == 2

    assert played(act) == 0
    line = "stopping: up to 1000 s for 1 request; a second signal cancels them"
    assert capsys.readouterr().err.splitlines() == [line]


def test_what_is_there_from_the_start_is_not_gone_through_again(
    played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the garbage collector, during which nothing else runs."""
    there = [[0]]

    def act(scene: Scene) -> None:
        assert all(one is not there for one in gc.get_objects())
        scene.signal()

    assert any(one is there for one in gc.get_objects())
    assert played(act) == 0
    assert capsys.readouterr().err.splitlines() == ["stopping: nothing runs"]


def test_all_that_a_server_says_is_json(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_kept():
        log_to_stderr("json")
        fields = {"telemetry__log_format": "json", "server__host": "0.0.0.0"}
        assert played(Scene.signal, **fields) == 0
    messages = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert messages[0].startswith("server.host is 0.0.0.0: whoever reaches this machine")
    assert messages[-1] == "stopping: nothing runs"


def test_a_terminal_that_closes_lets_running_calls_end(played: Played) -> None:
    """SIGHUP, which may come twice: by the shell and by the system."""

    def act(scene: Scene) -> None:
        stream = scene.generate(max_tokens=2)
        scene.signal(signal.SIGHUP)
        scene.wait_not_serving()
        scene.signal(signal.SIGHUP)
        scene.step()
        (last,) = stream
        assert last.finish.usage.output_tokens == 2

    with hangup(signal.SIG_DFL):
        assert played(act) == 0


def test_under_nohup_a_terminal_may_close(played: Played) -> None:
    def act(scene: Scene) -> None:
        scene.signal(signal.SIGHUP)
        stream = scene.generate(max_tokens=2)
        scene.step()
        assert [each.text for each in stream] == [" w1"]
        scene.signal()

    with hangup(signal.SIG_IGN):
        assert played(act) == 0


def test_after_the_grace_period_calls_are_cut(played: Played) -> None:
    def act(scene: Scene) -> None:
        stream = scene.generate()
        scene.signal()
        ended(stream, "shutting down")

    assert played(act, grace_s=0.0) == 0


def test_a_second_signal_cuts_the_grace_period_short(played: Played) -> None:
    def act(scene: Scene) -> None:
        stream = scene.generate()
        scene.signal(signal.SIGINT)
        scene.wait_not_serving()
        scene.signal(signal.SIGINT)
        ended(stream, "shutting down")

    assert played(act) == 0


def test_a_failed_engine_leaves_the_process_up_and_its_exit_code_is_1(played: Played) -> None:
    def act(scene: Scene) -> None:
        stream = scene.generate()
        scene.engine.fail(RuntimeError("told to"))
        ended(stream, "told to", "INTERNAL")
        scene.wait_not_serving()
        scene.signal()

    assert played(act) == 1


@pytest.mark.promise(22)
@pytest.mark.parametrize(
    ("error", "how", "code"),
    [(RuntimeError("told to"), "on", "INTERNAL"), (HostLost("told to"), "off", "UNAVAILABLE")],
)
def test_a_failed_engine_ends_the_process_where_the_config_says_so_and_a_lost_host_always(
    played: Played, error: Exception, how: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread of an engine that has lost a host may wait for it for ever; nobody waits for the
    grace period."""

    def act(scene: Scene) -> None:
        stream = scene.generate()
        (scene.engine.fail if how == "on" else scene.engine.lose)(error)
        ended(stream, "told to", code)

    assert played(act, server__exit_on_failure=how) == 1
    assert "the server stops: the engine failed: told to" in caplog.text


@pytest.mark.promise(22)
def test_a_hung_engine_ends_the_process_where_the_config_says_so() -> None:
    """In a process of its own, which it ends."""
    fields = ("server.exit_on_failure=on", "engine.stall_s=0.2")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.run_fake_server", "1000", *fields],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        with Client(running.stdout.readline().strip()) as client:
            stream = client.generate("hi")
            ended(stream, r"no step for 0\.2 s, with 1 request", "INTERNAL")
        assert running.wait(PATIENCE) == 1


def test_ctrl_c_ends_a_server_that_still_loads_at_once(tmp_path: Path) -> None:
    """Not at the next line of Python: a compiler may run for long, and crashes if it is left."""
    config = tmp_path / "mine.py"
    config.write_text("import sys\nprint('loading', flush=True)\nsys.stdin.read()\n")
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = serve_command(f"--config={config}")
    with subprocess.Popen(command, text=True, **pipes) as loading:  # type: ignore[call-overload]
        assert loading.stdout is not None and loading.stderr is not None
        assert loading.stdout.readline() == "loading\n"
        loading.send_signal(signal.SIGINT)
        assert loading.wait(PATIENCE) == -signal.SIGINT
        assert loading.stderr.read() == ""


def test_stop_says_whether_all_finished_and_stops_the_engine() -> None:
    idle = FakeEngine()
    server = Server(idle, grace_s=0.0)
    server.start()
    assert server.stop(timeout=PATIENCE)
    assert idle.stopped
    assert server.stop(timeout=PATIENCE)  # a second time does nothing

    busy = FakeEngine()
    server = Server(busy, grace_s=0.0)
    with Client(server.start()) as client:
        stream = client.generate("hi")
        busy.wait(lambda: busy.live)
        assert not server.stop(timeout=PATIENCE)
        with pytest.raises(ServerError, match="shutting down"):
            list(stream)
    assert not busy.live and busy.stopped


def test_a_signal_that_another_thread_catches_is_seen(engine: FakeEngine) -> None:
    """As is one that comes just before the main thread waits: neither wakes it up."""
    server = Server(engine)
    server.start()
    before = signal.signal(signal.SIGUSR1, lambda *_: server.request_stop())

    def catch() -> None:
        main = threading.main_thread().ident
        while sys._current_frames()[main].f_code.co_name != "_wait_for_tstate_lock":
            os.sched_yield()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    catcher = threading.Thread(target=catch)
    catcher.start()
    try:
        assert server.wait()
    finally:
        catcher.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_health_watch_does_not_hold_up_the_shutdown(server: Server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        server.stop(timeout=PATIENCE)
        assert NOT_SERVING in [status.status for status in _until_closed(watch)]


def test_two_servers_in_one_process(server: Server, engine: FakeEngine) -> None:
    other = FakeEngine()
    with Server(other, metrics_port=0) as second, Client(second.address) as client:
        assert second.address != server.address
        other.run()
        assert client.complete("hi", max_tokens=1)
    assert other.requests and not engine.requests


def test_a_taken_port_is_one_clear_line(server: Server) -> None:
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"server.port: cannot listen on localhost:{port}"):
        Server(FakeEngine(), port=port, metrics_port=0).start()


def _until_closed(watch) -> Iterator[health_pb2.HealthCheckResponse]:
    try:
        yield from watch
    except grpc.RpcError:
        return
