"""`bench abuse`: its attacks, on a server without a model, and its table."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.bench import cli
from jaxserve.config import ServerConfig
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.server.access.options import KEYS_VARIABLE, access_settings
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.batches.journal import Journal
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from jaxserve_lab.bench.stress import abuse, attacks, tenants
from jaxserve_lab.bench.stress.abuse import Row
from jaxserve_lab.bench.stress.faulty_server import Saboteur
from tests.server.fake_engine import FakeEngine, step_stats
from tests.server.http.conftest import SETTINGS

# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.fixture
def address() -> Iterator[str]:
    engine = FakeEngine()
    options = ServerOptions(max_calls=64)
    with Server(engine, grace_s=0.0, options=options) as server:
        engine.run()
        yield server.address


def test_prompts_far_too_long_are_all_refused(address: str) -> None:
    tried = asyncio.run(attacks.long_prompts(address))
    assert tried.problems == []
    assert tried.codes == {"RESOURCE_EXHAUSTED": 4, "INVALID_ARGUMENT": 8}
    assert tried.longest_s > 0


def test_bytes_that_are_no_message_are_all_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "MALFORMED", 250)
    tried = asyncio.run(attacks.malformed(address))
    assert tried.problems == []
    assert tried.codes == {"INVALID_ARGUMENT": 250}


@pytest.fixture
def two_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(KEYS_VARIABLE, tenants.key_lines())
    access = access_settings(ServerConfig())
    journal = Journal(tmp_path, 1 << 30)
    settings = BatchSettings(journal, in_flight=4, keep_s=3600.0)
    with (
        contextlib.closing(journal),
        Server(
            FakeEngine().run(), grace_s=0.0, http=SETTINGS, batches=settings, access=access
        ) as s,
    ):
        assert s.http_address is not None
        yield s.http_address


def test_a_key_that_wants_all_gets_its_own(two_keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "FILE_MIB", 2)
    tried = asyncio.run(tenants.too_much_at_once(two_keys))
    assert tried.problems == []
    assert tried.codes["quiet 200"] == 1
    told = sum(tried.codes[f"loud {status}"] for status in (200, 400, 429))
    assert told == 2 * tenants.CALLS
    monkeypatch.setattr(tenants, "PROMPTS", 2)
    tried = asyncio.run(tenants.many_prompts(two_keys))
    assert tried.codes["crowd 200"] == 1 and set(tried.codes) <= {"crowd 200", "quiet 200"}
    tried = asyncio.run(tenants.unread_files(two_keys))
    assert tried.problems == [] and tried.codes == {"200": tenants.FILES}


@pytest.mark.parametrize(
    ("finds", "problem"),
    [
        ("own", ""),
        ("nothing", "what a key has asked for itself was not found"),
        ("all", "another's prompts show by -"),
    ],
)
def test_what_shows_by_the_clock(monkeypatch: pytest.MonkeyPatch, finds: str, problem: str) -> None:
    drawn, known = random.Random(1), set[tuple[str, ...]]()

    def seconds(address: str, key: str, prompt: list[int], tried: attacks.Tried) -> float:
        root = "" if finds == "all" else key
        there = (root, *map(str, prompt)) in known
        if finds != "nothing":
            known.add((root, *map(str, prompt)))
        return drawn.lognormvariate(-5.0 - there, 0.5)

    monkeypatch.setattr(tenants, "_seconds", seconds)
    tried = asyncio.run(tenants.timed_prompts(""))
    assert sum(tried.codes.values()) == 3 * tenants.ROUNDS
    assert len(tried.problems) == bool(problem)
    assert all(each.startswith(problem) for each in tried.problems)


def test_numbers_at_the_edge_are_right_or_refused(address: str) -> None:
    tried = asyncio.run(attacks.extremes(address))
    assert tried.problems == []
    assert tried.codes == {"OK": 3, "INVALID_ARGUMENT": 1}


def test_of_a_crowd_all_are_served_or_told_when_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attacks, "OVERLOAD", 300)
    monkeypatch.setattr(attacks, "CHANNELS", 2)
    engine = FakeEngine()
    with Server(engine, grace_s=0.0, options=ServerOptions(max_calls=8)) as server:

        async def crowd() -> attacks.Tried:
            trying = asyncio.create_task(attacks.overload(server.address))
            await asyncio.to_thread(engine.wait, lambda: len(engine.live) == 8)
            engine.step()  # so that those hear something, and stay
            return await trying

        tried = asyncio.run(crowd())
    assert tried.codes == {"served": 8, "RESOURCE_EXHAUSTED": 292}
    assert [each for each in tried.problems if "more than 1 s" not in each] == []


def test_streams_can_be_left_unread_and_read_after_all(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "UNREAD", 3)
    unread = attacks.Unread(address)
    assert asyncio.run(attacks.served(address)) == "OK"
    assert unread.read().codes == {"OK": 3}
    unread.vanish()


def test_a_held_engine_goes_on_and_a_failed_one_does_not() -> None:
    executor, stats = JaxExecutor.__new__(JaxExecutor), step_stats(1)
    saboteur = Saboteur(executor)
    saboteur.on_step(stats)
    saboteur.hold()
    assert not saboteur._go_on.is_set()
    saboteur.hold()
    saboteur.on_step(stats)
    saboteur.fail()
    for launch in (executor.submit, executor.compute):
        with pytest.raises(jax.errors.JaxRuntimeError, match="sabotage"):
            launch(None, None)  # type: ignore[operator]


def test_the_table_says_what_did_not_hold() -> None:
    codes = Counter({"OK": 1, "RESOURCE_EXHAUSTED": 7999})
    good = Row("calls at once", codes, 0.5, 0.02, 0.009, 3.0, 1.0, 4)
    bad = Row("SIGTERM, unread", {"exit 1": 1}, 31.0, problems=["it took too long"])
    lines = abuse.text([good, bad]).splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["held", "yes", "no"]
    cells = "calls at once 1 OK, 7,999 RESOURCE_EXHAUSTED 0.50 s 20 ms 9 ms +3 MiB +1 MiB 4 yes"
    assert " ".join(lines[1].split()) == cells
    assert lines[3:] == ["SIGTERM, unread: it took too long"]


def test_wrong_flags_are_found_before_any_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(abuse, "run", lambda flags: pytest.fail("it ran"))
    assert cli.main(["abuse", "--config.scheduler.polcy=x"]) == 2
    assert "did you mean scheduler.policy" in capsys.readouterr().err


def test_its_exit_code_says_whether_all_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for problems, code in (([], 0), (["it broke"], 1)):
        rows = [Row("a", {"OK": 1}, problems=problems)]
        monkeypatch.setattr(abuse, "run", lambda flags, rows=rows: rows)
        assert cli.main(["abuse", "--json"]) == code
        assert '"attack": "a"' in capsys.readouterr().out
