"""`bench abuse`: its attacks, on a server without a model, and its table."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxserve.bench import cli
from jaxserve.config import ServerConfig
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.server.access.api_keys import Keys
from jaxserve.server.access.options import KEYS_VARIABLE, Access, access_settings
from jaxserve.server.http.transport import http_server, protocol
from jaxserve.server.requests.options import ServerOptions
from jaxserve.server.server import Server
from jaxserve_lab.bench.stress import abuse, attacks, http_attacks, server_process, tenants
from jaxserve_lab.bench.stress.abuse import Row
from jaxserve_lab.bench.stress.attacks import Tried
from jaxserve_lab.bench.stress.faulty_server import Saboteur
from tests.server.access.test_keys import key
from tests.server.batches.serving import serving
from tests.server.fake_engine import FakeEngine, step_stats
from tests.server.http.conftest import SETTINGS

# It is ml_collections that loads config files so.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.fixture(scope="module")
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
    with serving(FakeEngine().run(), tmp_path, http=SETTINGS, access=access) as server:
        assert server.http_address is not None
        yield server.http_address


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


def test_its_exit_code_says_whether_all_held(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for problems, code in (([], 0), (["it broke"], 1)):
        rows = [Row("a", {"OK": 1}, problems=problems)]
        monkeypatch.setattr(abuse, "run", lambda flags, rows=rows: rows)
        assert cli.main(["abuse", "--json"]) == code
        assert '"attack": "a"' in capsys.readouterr().out


# Attacks over HTTP.

KEY = "mine"


def served(access: Access, name: str | None = None) -> Iterator[Any]:
    with Server(FakeEngine().run(), grace_s=0.0, http=SETTINGS, access=access) as server:
        yield SimpleNamespace(
            http_address=server.http_address,
            key=name,
            memory_mib=lambda: 0.0,
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    yield from served(Access())


@pytest.fixture
def keyed() -> Iterator[Any]:
    yield from served(Access(Keys(fixed=[key(KEY)])), KEY)


@pytest.fixture
def open_to_all() -> Iterator[Any]:
    yield from served(Access(cors_origins=("*",), hosts=("*",)))


def test_strings_and_integers_are_refused_or_served(server: Any) -> None:
    for attack in (http_attacks.strings, http_attacks.integers):
        tried = attack(server)
        assert tried.problems == [] and set(tried.codes) <= {"200", "400"}, tried


def test_bodies_are_refused(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "BODY_BYTES", (20_000,))
    tried = http_attacks.bodies(server)
    assert [each for each in tried.problems if "200 for" not in each] == []
    assert tried.codes.keys() <= {"200", "400", "413"} and tried.codes["400"] >= 4


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "SILENT", 20)
    monkeypatch.setattr(http_attacks, "_SILENT_S", 0.5)
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    monkeypatch.setattr(http_server, "connections_of_a_door", lambda: 8)
    for server in served(Access()):
        tried = http_attacks.silent(server)
        assert tried.problems == [] and tried.codes == {"closed": 20}


def test_two_ends_and_other_sites_are_refused(server: Any, open_to_all: Any) -> None:
    assert http_attacks.framing(server).problems == []
    tried = http_attacks.browsers(server)
    assert tried.problems == [] and tried.codes == {"403": 6}
    assert http_attacks.browsers(open_to_all).problems != []


def test_liars_are_counted(keyed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_attacks, "LIARS", 3)
    monkeypatch.setattr(http_attacks, "HONEST", 2)
    tried = http_attacks.liars(keyed)
    assert tried.codes == Counter({"honest, 200": 2, "liars, 200": 3, "honest, refused": 0})


def test_a_case_says_what_did_not_hold(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"others_s": 0.2, "health_s": 0.3, "unanswered": 2.0, "memory_mib": 50.0}

    def watched(_: Any) -> Any:
        return abuse.contextlib.nullcontext(most)

    monkeypatch.setattr(abuse, "watched", watched)
    monkeypatch.setattr(abuse, "_kept", lambda _: 40.0)
    server.lines = lambda: 0
    case = abuse.AbuseCase("a", lambda _: Tried(), others_s=1.0, health_s=0.1, kept_mib=30)
    row = abuse.measured(server, case)
    assert row.problems == [
        "2 calls of others had no answer, and 0 is allowed",
        "/health took 300 ms, and 100 is allowed",
        "40 MiB were kept, and 30 is allowed",
    ]
    assert (row.others_s, row.memory_mib) == (0.2, 50.0)


def test_a_hostile_model_has_all_of_its_model(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("kind")
    with abuse.hostile_model([f"--model={tmp_path}"]) as (flag,):
        folder = type(tmp_path)(flag.removeprefix("--model="))
        assert (folder / "config.json").read_text() == "{}"
        assert (folder / "chat_template.jinja").read_text() == http_attacks.HOSTILE_TEMPLATE
    assert (tmp_path / "chat_template.jinja").read_text() == "kind"
    with abuse.hostile_model(["--model=", "--config.model.preset=opt-125m"]) as flags:
        assert flags == []


def test_a_config_comes_before_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def begin(command: list[str], **_: Any) -> None:
        commands.append(command)
        raise OSError("it is not to start")

    monkeypatch.setattr(server_process.subprocess, "Popen", begin)
    with pytest.raises(OSError, match="not to start"), server_process.victim("--config=tiny_cpu"):
        pass
    (command,) = commands
    fields = [i for i, word in enumerate(command) if word.startswith("--config.")]
    assert fields and command.index("--config=tiny_cpu") < min(fields)
