"""Floods of `bench abuse`: what one key sends, on a server without a model, and what is made of
another key's waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import ServerConfig
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.access.options import KEYS_VARIABLE, access_settings
from jaxserve_lab.bench.stress import abuse, floods, tenants
from jaxserve_lab.bench.stress.attacks import Tried
from jaxserve_lab.bench.stress.floods import COMPLETIONS, Asked, Flood
from tests.server.batches.serving import serving
from tests.server.fake_engine import FakeEngine
from tests.server.http.conftest import SETTINGS

pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


class Strict(FakeEngine):
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if len(text) > 5000:
            raise InvalidRequest("prompt", "is too long")
        return super().encode(text, special=special)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Takes bodies of any length, as one whose texts have no limit in bytes."""
    monkeypatch.setenv(KEYS_VARIABLE, tenants.key_lines())
    engine = Strict(max_requests=1000)
    monkeypatch.setattr(engine, "max_text_bytes", lambda: None)
    access = access_settings(ServerConfig())
    with serving(engine.run(), tmp_path, http=SETTINGS, access=access) as made:
        yield SimpleNamespace(http_address=made.http_address)


@pytest.mark.parametrize(
    "name",
    [
        "lines whose grammar never compiles",
        "grammars of 50 MiB",
        "grammars with costly masks",
        "48 prompts of 1.5 MB",
        "texts of 12 MB",
        "predictions of 8 MB",
        "32 chats with 128 tools",
    ],
)
def test_calls_end_as_they_are_meant_to(
    server: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for the time, which is the machine's."""
    monkeypatch.setattr(floods, "MIB", 1 << 14)
    monkeypatch.setattr(floods, "IDLE", 2)
    monkeypatch.setattr(floods, "FLOOD_S", 3.0)
    tried = floods.FLOODS[name](server)
    assert [each for each in tried.problems if "waited for" not in each] == []
    assert tried.codes and all(code.startswith("crowd ") for code in tried.codes)
    assert tried.idle_s > 0 and tried.worst_s >= tried.beside_s > 0


def test_what_is_found_again_is_told(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = itertools.chain((0.9,), itertools.repeat(0.1))
    monkeypatch.setattr(floods, "_found", lambda *_: next(shares))
    tried = floods.flood_of_caches(server)
    assert "quiet found 10% after it, and 90% before" in tried.problems
    assert tried.codes["quiet finds 10%"] == 1


@pytest.mark.parametrize(
    ("beside", "step", "held"), [(0.029, 0.0, True), (0.031, 0.0, False), (0.031, 0.05, True)]
)
def test_another_key_may_wait_three_times_as_long_or_for_a_step(
    monkeypatch: pytest.MonkeyPatch, beside: float, step: float, held: bool
) -> None:
    asked = Asked(COMPLETIONS, {})
    waits = itertools.chain(itertools.repeat(0.01, floods.IDLE), itertools.repeat(beside))

    def waited(server: Any, asked: Asked, tried: Tried) -> float:
        return next(waits)

    steps = iter([(1.0, 10.0), (1.0 + 4 * step, 14.0)])
    monkeypatch.setattr(floods, "_waited", waited)
    monkeypatch.setattr(floods, "_steps", lambda _: next(steps))
    monkeypatch.setattr(floods, "_status", lambda *_: 400)
    tried = Flood(lambda _: [asked] * 3, 2, lambda: asked)(SimpleNamespace())  # type: ignore[arg-type]
    assert (tried.problems == []) is held
    assert (tried.idle_s, tried.beside_s) == (0.01, beside) and tried.codes == {"crowd 400": 3}


def test_a_call_that_ends_otherwise_is_a_problem(server: Any) -> None:
    asked = Asked(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    wrong = Asked(COMPLETIONS, {"prompt": "a", "max_tokens": 0})
    tried = Flood(lambda _: [asked], 1, lambda: wrong)(server)
    assert "a call of crowd ended with 200" in tried.problems
    assert "a call of quiet ended with 400" in tried.problems


def test_the_wide_model_has_no_limit_in_bytes() -> None:
    with abuse.wide_model(["--config=configs/tiny_cpu.py"]) as (flag,):
        wide = load_tokenizer(Path(flag.removeprefix("--model=")))
        assert wide.max_bytes(100) is None
        assert len(wide.encode(" " * 10_000 + floods.MARK)) < 5
