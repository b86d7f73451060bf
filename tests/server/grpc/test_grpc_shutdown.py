"""Stopping: no new calls, the running ones get their grace, the process exits 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.client import Call, Client, ServerError
from jaxserve.config import ConfigError
from jaxserve.server.server import Server
from tests.server.fake_engine import FakeEngine
from tests.server.processes import serve_command

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE = 60


class Process:
    """tests/server/run_fake_server.py, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.log = ""  # once it has ended
        self.client = Client(address)
        self.health = grpc.insecure_channel(address)
        self._watch = health_pb2_grpc.HealthStub(self.health).Watch(health_pb2.HealthCheckRequest())

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def wait_not_serving(self) -> None:
        assert any(status.status == NOT_SERVING for status in self._watch)


@contextmanager
def hangup(handler: signal.Handlers) -> Iterator[None]:
    """What becomes of SIGHUP in processes that are started meanwhile."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def fake_server(grace_s: float, *fields: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "tests.server.run_fake_server", str(grace_s), *fields]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        running = Process(process, process.stdout.readline().strip())
        try:
            yield running
            assert process.wait(PATIENCE) is not None
            assert process.stderr is not None
            running.log = process.stderr.read()
        finally:
            process.kill()
            running.client.close()
            running.health.close()


def test_what_is_there_from_the_start_is_not_gone_through_again() -> None:
    """By the garbage collector, during which nothing else runs."""
    with fake_server(grace_s=1000) as server:
        server.tell("frozen")
        assert server.process.stdout is not None
        assert int(server.process.stdout.readline()) > 10_000
        server.process.send_signal(signal.SIGTERM)
    assert server.log.splitlines() == ["stopping: nothing runs"]


@pytest.mark.promise(21)
def test_sigterm_finishes_what_runs_says_so_and_exits_0() -> None:
    with fake_server(grace_s=1000) as server:
        stream = server.client.generate("hi", max_tokens=2)
        _first(server, stream)
        server.process.send_signal(signal.SIGTERM)
        server.wait_not_serving()
        with pytest.raises(ServerError, match="shutting down") as error:
            server.client.complete("hi", timeout=PATIENCE)
        assert error.value.code == "UNAVAILABLE" and error.value.retry_s
        server.tell("step")
        (last,) = stream
        assert last.text == " w1" and last.finish.usage.output_tokens == 2
    assert server.process.returncode == 0
    line = "stopping: up to 1000 s for 1 request; a second signal cancels them"
    assert server.log.splitlines() == [line]


def test_a_terminal_that_closes_lets_running_calls_end() -> None:
    """SIGHUP, which may come twice: by the shell and by the system."""
    with hangup(signal.SIG_DFL), fake_server(grace_s=1000) as server:
        stream = server.client.generate("hi", max_tokens=2)
        _first(server, stream)
        server.process.send_signal(signal.SIGHUP)
        server.wait_not_serving()
        server.process.send_signal(signal.SIGHUP)
        server.tell("step")
        (last,) = stream
        assert last.finish.usage.output_tokens == 2
    assert server.process.returncode == 0


def test_under_nohup_a_terminal_may_close() -> None:
    with hangup(signal.SIG_IGN), fake_server(grace_s=1000) as server:
        server.process.send_signal(signal.SIGHUP)
        stream = server.client.generate("hi", max_tokens=2)
        _first(server, stream)
        server.tell("step")
        assert [each.text for each in stream] == [" w1"]
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == 0


def test_after_the_grace_period_calls_are_cut_and_the_process_exits_0() -> None:
    with fake_server(grace_s=0) as server:
        stream = server.client.generate("hi")
        _first(server, stream)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerError, match="shutting down") as error:
            list(stream)
        assert error.value.code == "UNAVAILABLE"
    assert server.process.returncode == 0


def test_a_second_signal_cuts_the_grace_period_short() -> None:
    with fake_server(grace_s=1000) as server:
        stream = server.client.generate("hi")
        _first(server, stream)
        server.process.send_signal(signal.SIGINT)
        server.wait_not_serving()
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(ServerError, match="shutting down"):
            list(stream)
    assert server.process.returncode == 0


def test_a_failed_engine_leaves_the_process_up_and_its_exit_code_is_1() -> None:
    with fake_server(grace_s=1000) as server:
        stream = server.client.generate("hi")
        _first(server, stream)
        server.tell("fail")
        with pytest.raises(ServerError, match="told to"):
            list(stream)
        server.wait_not_serving()
        server.process.send_signal(signal.SIGTERM)
    assert server.process.returncode == 1


@pytest.mark.promise(22)
def test_a_failed_engine_ends_the_process_where_the_config_says_so() -> None:
    with fake_server(1000, "server.exit_on_failure=on") as server:
        stream = server.client.generate("hi")
        _first(server, stream)
        server.tell("fail")
        with pytest.raises(ServerError, match="told to") as error:
            list(stream)
        assert error.value.code == "INTERNAL"
    assert server.process.returncode == 1
    assert "the server stops: the engine failed: told to" in server.log


def test_a_lost_host_ends_the_process_whatever_the_config_says() -> None:
    """The engine's thread may wait for it for ever; nobody waits for the grace period."""
    with fake_server(1000, "server.exit_on_failure=off") as server:
        stream = server.client.generate("hi")
        _first(server, stream)
        server.tell("lose")
        with pytest.raises(ServerError, match="host 1 is gone") as error:
            list(stream)
        assert error.value.code == "UNAVAILABLE"
    assert server.process.returncode == 1
    assert "the server stops: the engine failed: host 1 is gone" in server.log


@pytest.mark.promise(22)
def test_a_hung_engine_ends_the_process_where_the_config_says_so() -> None:
    with fake_server(1000, "server.exit_on_failure=on", "engine.stall_s=0.2") as server:
        with pytest.raises(ServerError, match=r"no step for 0\.2 s, with 1 request") as error:
            list(server.client.generate("hi"))
        assert error.value.code == "INTERNAL"
    assert server.process.returncode == 1


def test_ctrl_c_ends_a_server_that_still_loads_at_once(tmp_path: Path) -> None:
    """Not at the next line of Python: a compiler may run for long, and crashes if it is left."""
    config = tmp_path / "mine.py"
    config.write_text("import sys\nprint('loading', flush=True)\nsys.stdin.read()\n")
    with subprocess.Popen(
        serve_command(f"--config={config}"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == -signal.SIGINT
        assert process.stderr.read() == ""


def _first(server: Process, stream: Call) -> None:
    """Makes the first token, and waits for it."""
    server.tell("step")
    assert next(stream).text == " w0"


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
