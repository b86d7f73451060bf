"""A request that was begun elsewhere goes on from its tokens as if it had been here all along."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import Output, TokenLogprobs
from jaxserve.engine.stats import Observer, RequestStats
from jaxserve.sched.request import SLO, Generated, Grammar, InvalidRequest, Request, SamplingParams
from tests.engine.harness import SCARCE, Stream, engine, generate, prompts

ONCE = "Once upon a time"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 7},
    "of two": {"temperature": 1.0, "seed": 7, "n": 2},
    "penalised": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "nucleus": {"temperature": 0.8, "seed": 1, "top_p": 0.9, "top_k": 20, "min_tokens": 10},
    "with logprobs": {"logprobs": 3, "temperature": 0.7, "seed": 3},
    "stopped": {"stop": ("very hap", "zzz")},
    "in a grammar": {"grammar": Grammar.regex("(Tim|Lily|Ben)( and (Tim|Lily|Ben)){3}[.] The end")},
    "of choices": {"grammar": Grammar.choice(("a happy little girl", "a happy big dog"))},
}


def ask(on: Engine, request: Request) -> Stream:
    stream = Stream(left=request.sampling.n)
    on.check(request)
    on.submit(request, stream)
    return stream.wait()


def cut(stream: Stream, index: int, count: int) -> Generated:
    """What had come of a continuation with its first tokens."""
    of = [output for output in stream.outputs if output.index == index]
    tokens = [token for output in of for token in output.token_ids][:count]
    times = [came for output in of for came in output.token_times][:count]
    logprobs = [(one.logprob, one.top) for output in of for one in output.logprobs][:count]
    return Generated(tuple(tokens), tuple(times), tuple(logprobs))


def said(stream: Stream, index: int) -> tuple[Any, ...]:
    of = [output for output in stream.outputs if output.index == index]
    logprobs: list[TokenLogprobs] = [one for output in of for one in output.logprobs]
    last, usage = of[-1], of[-1].usage
    assert usage is not None
    ended = last.finish_reason, last.stop_string, usage.prompt_tokens, usage.output_tokens
    return stream.tokens(index), stream.text(index), logprobs, ended


@pytest.mark.promise(48)
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_same_bits(on: Engine, kind: str) -> None:
    sampling = SamplingParams(**{"max_tokens": 24, **KINDS[kind]})
    request = Request("whole", tuple(on.encode(ONCE)), sampling)
    whole, n = ask(on, request), sampling.n
    lengths = [len(whole.tokens(index)) for index in range(n)]
    for count in (1, 7, max(lengths) - 1):
        generated = tuple(cut(whole, index, count + 5 * index) for index in range(n))
        moved = dataclasses.replace(request, id=f"from {count}", generated=generated, moved=(0.5,))
        again = ask(on, moved)
        for index in range(n):
            assert said(again, index) == said(whole, index), (count, index)
            mine = [output for output in again.outputs if output.index == index]
            replayed = [output for output in mine if output.replayed]
            assert [replayed[0]] == replayed == mine[:1]
            assert replayed[0].token_ids == generated[index].tokens
            timings = mine[-1].timings
            assert timings is not None and timings.moved == (0.5,)


def test_it_waits_for_memory_like_any_other(shapes: dict[str, Path]) -> None:
    """Preempted where it goes on, and found in what others have left there."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    fields = {"scheduler__policy": "vllm", "cache__prefix_caching": True, **SCARCE}
    with engine(shapes["opt"], **fields) as on:
        asked = [Request(f"a{i}", tuple(one), sampling) for i, one in enumerate(prompts(12))]
        whole = [ask(on, request) for request in asked]
        streams = [Stream() for _ in asked]
        for request, stream, before in zip(asked, streams, whole, strict=True):
            moved = dataclasses.replace(
                request, id=f"b{request.id}", generated=(cut(before, 0, 11),)
            )
            on.submit(moved, stream)
        again = [stream.wait() for stream in streams]
        assert on.stats().preemptions > 0
        assert [one.tokens() for one in again] == [one.tokens() for one in whole]
        moved = dataclasses.replace(asked[0], id="c", generated=(cut(whole[0], 0, 20),))
        ask(on, moved)
        usage = ask(on, dataclasses.replace(moved, id="d")).last().usage
        assert usage is not None and usage.cached_tokens == len(asked[0].prompt)


class Told(Observer):
    def __init__(self) -> None:
        self.ttft: list[float] = []
        self.gaps: list[float] = []
        self.ended: list[RequestStats] = []

    def on_first_token(self, ttft: float, tier: Any) -> None:
        self.ttft.append(ttft)

    def on_inter_token(self, tbt: float, tier: Any) -> None:
        self.gaps.append(tbt)

    def on_finish(self, stats: RequestStats) -> None:
        self.ended.append(stats)


def test_its_clocks_go_on(on: Engine) -> None:
    told = Told()
    on.add_observer(told)
    arrival = time.monotonic() - 10
    came = (arrival + 1.0, arrival + 1.25, arrival + 1.5)
    slo = SLO(ttft=1.5, tbt=0.3, max_tbt=60.0)
    before = Generated(tuple(on.encode(" there was")[:1]) * 3, came, given_up=True)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    moved = Request("m", (5, 6), sampling, slo, arrival=arrival, generated=(before,), moved=(2.0,))
    last = ask(on, moved).last()
    assert last.timings is not None and last.verdict is not None
    assert last.timings.ttft == pytest.approx(1.0) and last.timings.preprocess == 0.0
    assert 8.0 < (last.timings.tbt_max or 0) < 60, "the gap of the move is one"
    assert last.verdict.ttft and last.verdict.max_tbt and last.verdict.tbt is False
    assert not told.ttft and len(told.gaps) == 2 and len(told.ended) == 1


def test_what_has_ended_elsewhere_is_only_told(on: Engine) -> None:
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, n=2, temperature=1.0, seed=2)
    request = Request("whole", tuple(on.encode(ONCE)), sampling)
    whole, told = ask(on, request), Told()
    on.add_observer(told)
    for counts in ((6, 2), (2, 6), (6, 6)):
        generated = tuple(cut(whole, index, count) for index, count in enumerate(counts))
        again = ask(on, dataclasses.replace(request, id=f"{counts}", generated=generated))
        assert [said(again, i) for i in (0, 1)] == [said(whole, i) for i in (0, 1)]
    assert len(told.ended) == 2, "only what has ended here is counted here"


@pytest.mark.parametrize(
    ("generated", "problem"),
    [
        (Generated((5,) * 9, (1.0,) * 9), "generated: has 9 tokens; max_tokens is 8"),
        (Generated((5,), ()), "generated: has not a time"),
        (Generated((5, 5), (2.0, 1.0)), "generated: has tokens that came before"),
        (Generated((1 << 30,), (1.0,)), "generated: token id 1073741824 is outside"),
        (Generated((5,), (1.0,), ((0.5, ()),)), "generated: has not a time, or no logprob"),
    ],
)
def test_what_cannot_be_is_refused(on: Engine, generated: Generated, problem: str) -> None:
    request = Request("bad", (5, 6), SamplingParams(max_tokens=8), generated=(generated,))
    with pytest.raises(InvalidRequest, match=problem):
        on.check(request)


def test_nothing_follows_an_end(on: Engine) -> None:
    outputs: list[Output] = []
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(7,))
    for generated in ((7, 5), (5, 7, 7)):
        before = Generated(generated, (1.0,) * len(generated))
        request = Request("over", (5, 6), sampling, generated=(before,))
        with pytest.raises(InvalidRequest, match="generated: goes on after the end"):
            on.submit(request, outputs.append)
    with pytest.raises(InvalidRequest, match="generated: has 1 continuations of 2"):
        on.check(dataclasses.replace(request, sampling=SamplingParams(n=2)))
    assert not outputs and generate(on, [[5, 6]], max_tokens=2)
