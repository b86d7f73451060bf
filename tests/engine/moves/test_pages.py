"""A cache that comes along with a request: found like any other, and only by who may."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine import step_loop
from jaxserve.engine.engine import Engine
from jaxserve.engine.stats import Observer
from jaxserve.sched.request import Generated, Request, SamplingParams
from tests.engine.harness import Gate, Stream, engine, wait_until_idle

FIELDS: dict[str, Any] = {"cache__prefix_caching": True, "cache__host_gib": 0.01}
PROMPT = tuple(range(5, 31))


@pytest.fixture(scope="module")
def two(shapes: dict[str, Path]) -> Iterator[tuple[Engine, Engine]]:
    """One from which a request goes, and one to which it comes."""
    secret = b"s" * 32
    with (
        engine(shapes["opt"], block_secret=secret, **FIELDS) as here,
        engine(shapes["opt"], block_secret=secret, **FIELDS) as there,
    ):
        yield here, there


def halfway(on: Engine, request: Request, tokens: int) -> tuple[Generated, dict[bytes, np.ndarray]]:
    """What there is of a request after so many tokens: tokens, and the cache."""
    gate, stream = Gate(), Stream()
    came: list[int] = []

    def on_output(output: Any) -> None:
        came.extend(output.token_ids)
        if len(came) >= tokens:
            gate(output)

    stream.on_output = on_output
    on.submit(request, stream)
    gate.reached()
    done = on.exporting(request.id, 1 << 30)
    gate.open()
    pages = {key: one.wait(60) for key, one in done.result(60).items()}
    stream.wait()
    times = [came for output in stream.outputs for came in output.token_times]
    return Generated(tuple(stream.tokens()[:tokens]), tuple(times[:tokens])), pages


def test_it_finds_what_has_come_along(two: tuple[Engine, Engine]) -> None:
    here, there = two
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    request = Request("a", PROMPT, sampling)
    whole = Stream()
    here.submit(dataclasses.replace(request, id="whole", tenant="other"), whole)
    expected = whole.wait().tokens()
    generated, pages = halfway(here, request, 13)
    assert {len(key) for key in pages} == {16}
    pages = dict(list(pages.items())[: (len(PROMPT) + 12) // 4])
    assert len(pages) == 9
    moved = dataclasses.replace(request, generated=(generated,), moved=(1.0,))
    came = list[tuple[int, int]]()

    class Told(Observer):
        def on_moved(self, number: int, generated: int, cached: int) -> None:
            came.append((generated, cached))

    there.add_observer(Told())

    def resumed(name: str, **changes: Any) -> tuple[list[int], int]:
        there.reset_prefix_cache()
        before, stream = there.stats().slots_restored, Stream()
        there.submit(dataclasses.replace(moved, id=name, **changes), stream)
        assert stream.wait().tokens() == expected
        wait_until_idle(there)
        return stream.tokens(), there.stats().slots_restored - before

    assert resumed("with nothing")[1] == 0
    assert resumed("with all", pages=pages)[1] == 2 * 4 * len(pages)
    some = dict(list(pages.items())[:4])
    assert resumed("with some", pages=some)[1] == 2 * 4 * 4
    gap = {key: page for key, page in pages.items() if key != [*pages][2]}
    assert resumed("with a gap", pages=gap)[1] == 2 * 4 * 2
    wrong = {key: page[:-1] for key, page in pages.items()}
    assert resumed("with what does not fit", pages=wrong)[1] == 0
    other = {key: page.astype(np.float64) for key, page in pages.items()}
    assert resumed("with other numbers", pages=other)[1] == 0
    assert resumed("with others' keys", pages={b"x" * 16: next(iter(pages.values()))})[1] == 0
    assert resumed("of another tenant", tenant="else", pages=pages)[1] == 0
    assert came == [(13, 4 * blocks) for blocks in (0, 9, 4, 2, 0, 0, 0, 0)]


def test_no_more_is_copied_than_may_be_sent(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What continuations share only once, and little between two steps."""
    here, _ = two
    wait_until_idle(here)
    here.reset_prefix_cache()
    monkeypatch.setattr(step_loop, "ROOM", 2 * 2 * 4)  # two blocks
    gate, stream, saved = Gate(), Stream(left=2), list[int]()
    save, submit = here.executor.save, here.executor.submit
    between = [0]

    def noted(keys: Any, *given: Any) -> None:
        saved.extend(keys)
        between[-1] += len(keys)
        save(keys, *given)

    def stepped(*given: Any, **more: Any) -> Any:
        between.append(0)
        return submit(*given, **more)

    monkeypatch.setattr(here.executor, "save", noted)
    monkeypatch.setattr(here.executor, "submit", stepped)
    stream.on_output = gate
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, n=2)
    here.submit(Request("bounded", PROMPT, sampling), stream)
    gate.reached()
    page = here.executor.page_bytes
    asked = [here.exporting("bounded", room) for room in (0, page - 1, 3 * page, 1 << 30)]
    gate.open()
    sent = [done.result(60) for done in asked]
    sizes = [sum(one.wait(60).nbytes for one in each.values()) for each in sent]
    assert sizes[:3] == [0, 0, 3 * page] and len(sent[3]) >= len(PROMPT) // 4
    assert len(saved) == 3 + len(sent[3]) and max(between) == 2 * 2, "for two who ask"
    assert list(sent[3])[:3] == list(sent[2])
    stream.wait()


def test_what_was_sent_ahead_is_not_sent_again(two: tuple[Engine, Engine]) -> None:
    """The rest alone continues it; and an engine says how long it would compute what it lacks."""
    here, there = two
    for one in two:
        wait_until_idle(one)
        one.reset_prefix_cache()
    gate, stream = Gate(), Stream()
    stream.on_output = gate
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
    request = Request("ahead", PROMPT, sampling)
    here.submit(request, stream)
    gate.reached()
    first = here.exporting("ahead", 1 << 30)
    gate.open()
    ahead = {key: one.wait(60) for key, one in first.result(60).items()}
    some = dict(list(ahead.items())[:4])
    rest = here.exporting("ahead", 1 << 30, some).result(60)
    stream.wait()
    assert len(ahead) > 4 and not {*rest} & {*some} and {*ahead} - {*some} <= {*rest}
    keys = [*some, *rest]
    wait_until_idle(here)
    assert here.recompute_seconds(keys) == 0
    assert there.recompute_seconds(keys) > there.recompute_seconds(keys[:4]) > 0
    pages = some | {key: one.wait(60) for key, one in rest.items()}
    generated = Generated(tuple(stream.tokens()[:1]), (0.0,))
    moved, again = dataclasses.replace(request, generated=(generated,), pages=pages), Stream()
    there.submit(moved, again)
    assert again.wait().tokens() == stream.tokens()
    assert there.recompute_seconds(list(pages)[:6]) == 0


def test_nothing_is_sent_of_what_is_not_there(two: tuple[Engine, Engine]) -> None:
    here, _ = two
    assert here.export("nobody", 60, 1 << 30) == {}


def test_what_does_not_fit_into_host_memory_is_computed(shapes: dict[str, Path]) -> None:
    fields = {**FIELDS, "cache__host_gib": 0.0}
    with engine(shapes["opt"], **fields) as small:
        stream = Stream()
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        pages = {b"x" * 16: np.zeros((8, 2, 4, 8), np.float32)}
        small.submit(Request("a", PROMPT, sampling, pages=pages), stream)
        assert len(stream.wait().tokens()) == 8 and small.export("a", 60, 1 << 30) == {}


def test_what_does_not_fit_is_gone_while_the_request_runs(two: tuple[Engine, Engine]) -> None:
    here, _ = two
    gate, stream = Gate(), Stream()
    stream.on_output = gate
    page = np.zeros(1)
    gone = weakref.ref(page)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    here.submit(Request("unfit", PROMPT, sampling, pages={b"x" * 16: page}), stream)
    del page
    gate.reached()
    gc.collect()
    try:
        assert gone() is None
    finally:
        gate.open()
        stream.wait()


def test_a_copy_that_fails_is_only_whoever_asked_for_it_to_know(
    two: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = two
    wait_until_idle(here)
    here.reset_prefix_cache()
    gate, stream = Gate(), Stream()
    stream.on_output = gate
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    here.submit(Request("failing", PROMPT, sampling), stream)
    gate.reached()

    def failing(*given: Any) -> None:
        raise MemoryError("no host memory")

    with monkeypatch.context() as patch:
        patch.setattr(here.executor, "save", failing)
        done = here.exporting("failing", 1 << 30)
        gate.open()
        with pytest.raises(MemoryError, match="no host memory"):
            done.result(60)
    assert len(stream.wait().tokens()) == 8
