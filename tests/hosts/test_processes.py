"""A model over several processes writes what it writes on one; whichever of them dies, or stops,
the others end, and so do the calls."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.commands.convert import convert
from jaxserve.deploy.local.cluster import free_port
from jaxserve.hosts.group import OTHER
from jaxserve.sched.request import Grammar, GrammarKind
from tests.engine.harness import BOX, engine, prompts, send, write_shape
from tests.server.processes import ROOT

from .processes import PATIENCE, Hosts, host_command, hosts

pytestmark = pytest.mark.slow

STORIES = ["Once upon a time", "The dog", "Lily wanted to", "One day, a bird"]
GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]{4,12} and [a-z]{4,12}")
GREEDY = {"max_tokens": 24, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.3}
SWAPS = (  # scarce, so that caches go to the hosts' memory and back
    "--config.scheduler.policy=fastserve:quantum=1.0",
    "--config.cache.num_blocks=36",
    "--config.cache.host_gib=0.01",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shapes"), "llama")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Hosts]]:
    """Starts a group, which lives until the module's tests have run."""
    with ExitStack() as running:

        def start(*arguments: Any) -> Hosts:
            return running.enter_context(hosts(tmp_path_factory.mktemp("hosts"), *arguments))

        yield start


def alone(path: Path, wanted: Sequence[Any], load_format: str = "random") -> list[list[int]]:
    """The tokens of one process on one device, by (prompt, sampling)."""
    with engine(path, model__load_format=load_format) as running:
        streams = []
        for prompt, sampling in wanted:
            ids = running.encode(prompt) if isinstance(prompt, str) else prompt
            streams.append(send(running, ids, **sampling)[1])
        return [stream.wait().tokens() for stream in streams]


def together(client: Client, wanted: Sequence[Any]) -> list[list[int]]:
    """The same of a group, all at once."""
    found: list[list[int]] = [[] for _ in wanted]

    def ask(number: int, prompt: Any, sampling: dict[str, Any]) -> None:
        (answer,) = client.complete(prompt, timeout=PATIENCE, **sampling)
        found[number] = list(answer.token_ids)

    threads = [
        threading.Thread(target=ask, args=(number, *each)) for number, each in enumerate(wanted)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Load:
    """Callers who ask again and again; `errors` once each has been refused."""

    def __init__(self, client: Client, prompt: Any, callers: int = 4) -> None:
        self._client, self._prompt = client, prompt
        self._served = threading.Semaphore(0)
        self._errors: list[ServerError] = []
        self._threads = [threading.Thread(target=self._call) for _ in range(callers)]
        for thread in self._threads:
            thread.start()

    def _call(self) -> None:
        while True:
            try:
                self._client.complete(self._prompt, timeout=PATIENCE, **GREEDY)
                self._served.release()
            except ServerError as error:
                self._errors.append(error)
                return

    def wait_served(self, count: int = 8) -> None:
        for _ in range(count):
            assert self._served.acquire(timeout=PATIENCE)

    def errors(self) -> list[ServerError]:
        for thread in self._threads:
            thread.join(PATIENCE)
        return self._errors


def metric(group: Hosts, name: str) -> float:
    with urllib.request.urlopen(group.metrics) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"jaxserve:{name}"))


def test_two_hosts_write_what_one_does_with_caches_that_go_to_both_and_stop_in_order(
    start: Callable[..., Hosts],
) -> None:
    wanted = [(story, GREEDY) for story in STORIES * 2] + [(STORIES[1], SAMPLED)]
    wanted.append((STORIES[0], {**GREEDY, "grammar": GRAMMAR}))
    group = start(2, 2, f"--model={BOX}", *SWAPS)
    told = [(p, {k: _told(v) for k, v in sampling.items()}) for p, sampling in wanted]
    with group.client() as client:
        assert together(client, told) == alone(BOX, wanted, "auto")
    assert metric(group, "checkpointed_slots") > 0
    assert metric(group, "compiles_after_warmup") == 0
    group.leader.send_signal(signal.SIGTERM)
    assert group.codes() == [0, 0], group.logged(0) + group.logged(1)
    for index in range(2):
        assert "Traceback" not in group.logged(index)


def _told(value: Any) -> Any:
    """As the client takes it."""
    return {value.kind: value.text} if isinstance(value, Grammar) else value


def test_a_follower_that_dies_ends_the_calls_and_the_group_which_serves_again_once_started(
    start: Callable[..., Hosts], llama: Path
) -> None:
    wanted = [(prompt, GREEDY) for prompt in prompts(6)]
    expected = alone(llama, wanted)
    flags = (2, 2, f"--model={llama}", "--load_format=random")
    first = start(*flags)
    with first.client() as client:
        assert together(client, wanted) == expected
        load = Load(client, wanted[0][0])
        load.wait_served()
        first.processes[1].kill()
        errors = load.errors()
    assert {error.code for error in errors} == {"UNAVAILABLE"}
    assert any("host 1 is gone" in str(error) for error in errors), errors
    assert first.codes() == [1, -signal.SIGKILL], first.logged(0)

    again = start(*flags)
    with again.client() as client:
        assert together(client, wanted) == expected
        load = Load(client, wanted[0][0])
        load.wait_served()
        again.leader.kill()
        assert {error.code for error in load.errors()} == {"UNAVAILABLE"}
    leader, follower = again.codes()
    assert leader == -signal.SIGKILL
    assert follower != 0, again.logged(1)


def test_four_hosts_write_what_one_does_and_one_that_stops_ends_them_all(
    start: Callable[..., Hosts], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Caches of both kinds, and the weights from Orbax."""
    orbax = tmp_path_factory.mktemp("orbax") / "stories"
    convert(BOX, orbax, "float32")
    wanted = [(story, GREEDY) for story in STORIES]
    hidden = ("--config.scheduler.policy=aptserve", "--config.cache.rho=0")
    group = start(4, 1, f"--model={orbax}", *hidden, "--config.cache.num_blocks=64")
    with group.client() as client:
        assert together(client, wanted) == alone(BOX, wanted, "auto")
        load = Load(client, STORIES[0])
        load.wait_served()
        group.processes[2].send_signal(signal.SIGSTOP)
        errors = load.errors()
    assert {error.code for error in errors} == {"UNAVAILABLE"}
    assert group.leader.wait(PATIENCE) == 1
    for index in (1, 3):
        assert group.processes[index].wait(PATIENCE) != 0, group.logged(index)


def test_a_follower_without_a_leader_says_so(llama: Path) -> None:
    port = free_port()
    command = host_command(2, port, 1, f"--model={llama}", "--load_format=random")
    command += ["--config.mesh.tensor=2", "--config.mesh.hosts_wait_s=0.5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    line = f"serve.py: mesh.coordinator: nobody answers at localhost:{port} within 0.5 s"
    assert done.stderr.startswith(line) and len(done.stderr.splitlines()) == 1, done.stderr


def test_hosts_that_differ_say_where(llama: Path, tmp_path: Path) -> None:
    """The follower has another model and waits for no group; the leader waits in vain."""
    port = free_port()
    other = tmp_path / "other"
    other.mkdir()
    shape = json.loads((llama / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(shape))
    commands = [
        [*host_command(2, port, index, f"--model={path}", "--load_format=random"), *more]
        for index, path, more in (
            (0, llama, ["--config.mesh.tensor=2", "--config.mesh.hosts_wait_s=20.0"]),
            (1, other, ["--config.mesh.tensor=2"]),
        )
    ]
    leader, follower = (
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for command in commands
    )
    said, told = follower.communicate(timeout=PATIENCE)[1], leader.communicate(timeout=PATIENCE)[1]
    assert (follower.returncode, leader.returncode) == (1, 1)
    assert said == f"serve.py: {OTHER}\n"
    assert "is refused: model.path: it has '" in told
    assert "mesh.hosts: 0 of 1 followers have come" in told.splitlines()[-1]
