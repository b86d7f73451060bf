"""What is found instead of computed never changes text, and nobody finds what another has."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.block_keys import BlockKeys, KeyChain
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import Output
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.stats import StepRecorder
from jaxserve.sched.cache.free_blocks import FreeBlocks
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler
from tests.engine import mixed_caches
from tests.engine.conftest import Engines, Texts
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    Stream,
    engine,
    generate,
    prompts,
    send,
    wait_until_idle,
)

REUSE = {"cache__prefix_caching": True}
SHORT = {"max_tokens": 12, "ignore_eos": True}


def next_turns(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """What those would ask next who were answered so, as far as there is room: 16 tokens are."""
    before = zip(prompts(len(texts)), texts, strict=True)
    return [[*prompt, *text[:8], 5 + i % 3][-40:] for i, (prompt, text) in enumerate(before)]


def cached(on: Engine, prompt: Sequence[int], **sampling: Any) -> tuple[list[int], int]:
    """What it is answered, and how many of its tokens were found."""
    stream = send(on, prompt, **{**SHORT, **sampling})[1].wait()
    usage = stream.last().usage
    assert usage is not None
    return stream.tokens(), usage.cached_tokens


@contextmanager
def poisoned(on: Engine) -> Iterator[None]:
    """Blocks hold NaN from the moment at which they are free, so that whoever still reads them
    writes something else."""
    given: list[np.ndarray] = []
    with pytest.MonkeyPatch.context() as patch:
        push, book = FreeBlocks.push, on._scheduler.book

        def pushed(self: FreeBlocks, ids: np.ndarray) -> None:
            given.append(ids.copy())
            push(self, ids)

        def booked(plan: Any) -> Any:
            # What this plan gives back may be copied yet, as its first act on the device.
            pool = on._scheduler.pool
            taken = set(pool.holders()[0].tolist())
            taken |= {block for page in pool.cache.pages() for block in page.ids}
            ids = np.array([i for ids in given for i in ids.tolist() if i not in taken], np.int32)
            given.clear()
            if len(ids):
                executor: Any = on.executor
                padded = np.resize(ids, 1 << int(len(ids) - 1).bit_length())
                executor.pool = executor.pool.at[:, padded].set(jnp.nan)
            return book(plan)

        patch.setattr(FreeBlocks, "push", pushed)
        patch.setattr(on._scheduler, "book", booked)
        yield


@pytest.fixture(scope="module")
def second(engines: Engines, alone: Texts) -> list[list[int]]:
    """What the second turns are answered with nothing beside them, and nothing found."""
    asked = next_turns(alone("opt"))
    return [generate(engines("opt"), [prompt], **SHORT)[0] for prompt in asked]


# Chunks, whole prompts, caches of both kinds, and blocks filled from both ends; that every policy
# finds what there is, and frees what nobody reads, is in tests/sched/cache/test_policies_share.py.
POLICIES = ("sarathi", "vllm", "aptserve", "bros")


@pytest.mark.promise(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_text(shapes: dict[str, Path], alone: Texts, second: list[list[int]], policy: str) -> None:
    fields = {**REUSE, **SCARCE, "scheduler__policy": policy, "engine__forbid_compile": False}
    fields["cache__num_blocks"] = 120
    if make_policy(policy).moves_cache:
        fields["cache__host_gib"] = 1e-3
    with engine(shapes["opt"], **fields) as running, poisoned(running):
        assert generate(running, prompts(), **SAMPLING) == alone("opt")
        asked = next_turns(alone("opt"))[-8:]  # of the others hardly anything is there
        assert generate(running, asked, **SHORT) == second[-8:]
        for _ in range(2):  # the last one is there, the second time
            assert generate(running, asked[-1:], **SHORT) == second[-1:]
        cache = running._scheduler.cache
        assert cache is not None and cache.num_reused and cache.num_evicted


@pytest.mark.promise(3)
def test_text_of_hidden_vectors(
    shapes: dict[str, Path],
    alone: Texts,
    second: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some become K and V in place, and are found as such."""
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    fields = {**REUSE, **SCARCE, "scheduler__policy": "mixed_chunks", "cache__rho": "0"}
    fields |= {"cache__num_blocks": 120, "engine__forbid_compile": False}
    with engine(shapes["opt"], **fields) as running, poisoned(running):
        assert generate(running, prompts(), **SAMPLING) == alone("opt")
        asked = next_turns(alone("opt"))[-8:]
        for _ in range(2):
            assert generate(running, asked, **SHORT) == second[-8:]
        policy: Any = running._scheduler.policy
        assert policy.seen.found and policy.seen.projected and policy.seen.mixed


@pytest.mark.promise(3)
@pytest.mark.parametrize("policy", ["sarathi", "aptserve"])
def test_text_from_host_memory(
    shapes: dict[str, Path],
    alone: Texts,
    second: list[list[int]],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # To compute a token of so small a model takes no longer than to copy it.
    monkeypatch.setattr(Scheduler, "_least_depth", lambda self: 0.0)
    fields = {**REUSE, **SCARCE, "scheduler__policy": policy, "engine__forbid_compile": False}
    fields |= {"cache__num_blocks": 80, "cache__host_gib": 1e-3}
    if policy == "aptserve":  # whose kind of cache must not hang on how busy the machine is
        fields |= {"cache__rho": "1"}
    with engine(shapes["opt"], **fields) as running, poisoned(running):
        assert generate(running, prompts(), **SAMPLING) == alone("opt")
        for _ in range(2):
            assert generate(running, next_turns(alone("opt")), **SHORT) == second
        stats = running.stats()
        assert sum(stats.prefix_cache_host_hits.values()) > 20 < stats.prefix_cache_host_tokens
        assert stats.slots_restored >= 2 * sum(stats.prefix_cache_host_hits.values())
        running.reset_prefix_cache()
        assert cached(running, prompts()[0])[1] == 0
        executor: Any = running.executor
        there, kept = running.stats().prefix_cache_host_tokens, executor._mover._host.keys
        assert running.stats().host_slots_used == 0 and there < 100
        assert len(kept) * running.info().block_size == there, "what is forgotten is freed"


@pytest.fixture(scope="module")
def reusing(shapes: dict[str, Path]) -> Iterator[Engine]:
    with engine(shapes["opt"], **REUSE) as running:
        yield running


def test_the_last_token_is_always_computed(reusing: Engine) -> None:
    prompt = [7 + i % 5 for i in range(16)]
    assert cached(reusing, prompt)[1] == 0
    text, found = cached(reusing, prompt)
    assert found == 12, "the last of four blocks has to say what comes next"
    assert cached(reusing, [*prompt, *text[:5]])[1] == 20, "answers are found, too"


@pytest.mark.promise(15)
def test_nobody_finds_what_another_has(reusing: Engine) -> None:
    prompt = [11 + i % 7 for i in range(20)]

    def ask(tenant: str = "", salt: str = "", **sampling: Any) -> int:
        stream = Stream()
        params = SamplingParams(**{**SHORT, **sampling})
        name = f"{tenant}/{salt}/{len(asked)}"
        asked.append(name)
        request = Request(name, tuple(prompt), params, tenant=tenant, cache_salt=salt)
        reusing.check(request)
        reusing.submit(request, stream)
        usage = stream.wait().last().usage
        assert usage is not None
        return usage.cached_tokens

    asked: list[str] = []
    assert ask("a") == 0 and ask("a") == 16
    assert ask("b") == 0, "another tenant's"
    assert ask("a", "salt") == 0 and ask("a", "salt") == 16
    assert ask("a\0salt") == 0 and ask("", "a") == 0, "names do not run into salts"
    assert ask("\ud800", "\ud800") == 0 and ask("\ud800", "\ud800") == 16
    assert ask("a", prompt_logprobs=0) == 0, "log-probabilities of the prompt have to be computed"


def test_keys_may_share() -> None:
    tokens = range(20)
    assert BlockKeys(4).of(tokens, "a").keys != BlockKeys(4).of(tokens, "a").keys, "its own secret"
    shared = BlockKeys(4, shared=True)
    assert shared.of(tokens, "a").keys == shared.of(tokens, "b").keys
    assert shared.of(tokens, "a", "x").keys[0] != shared.of(tokens, "a").keys[0], "salts part them"


def test_a_prompts_keys_are_made_once(reusing: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again by the predicted wait, and not again when it is submitted."""
    hashed, add = [], KeyChain._add

    def counts(chain: KeyChain, tokens: array.array[int]) -> None:
        hashed.append(len(tokens))
        add(chain, tokens)

    prompt = tuple(3 + i % 19 for i in range(38))
    asked = Request("once", prompt, SamplingParams(**SHORT), cache_salt="s")
    monkeypatch.setattr(KeyChain, "_add", counts)
    known = reusing.with_keys(asked)
    reusing.expected_wait(known)
    stream = Stream()
    reusing.submit(known, stream)
    text = stream.wait().tokens()
    assert [each for each in hashed if each > 4] == [38]
    one = BlockKeys(4)
    whole, parts = (one.of(prompt, known=one.of(prompt).keys[:n]) for n in (0, 7))
    assert [key for t in text for key in whole.extend([t])] == parts.extend(text)
    assert whole.keys == parts.keys and len(whole.keys) == (38 + len(text)) // 4


def test_a_prompt_is_computed_once_for_all_its_continuations(reusing: Engine) -> None:
    prompt = [13 + i % 11 for i in range(23)]
    recorder = StepRecorder()
    reusing.add_observer(recorder)
    stream = send(reusing, prompt, n=4, temperature=1.0, seed=3, **SHORT)[1].wait()
    wait_until_idle(reusing)
    usages = [stream.last(index).usage for index in range(4)]
    assert [usage.cached_tokens for usage in usages if usage] == [0, 20, 20, 20]
    computed = sum(step.num_tokens for step in recorder.steps)
    assert computed == 23 + 3 * 3 + 4 * 11, "prompts, and all but the last token of each answer"


def test_what_a_request_that_failed_has_written_is_not_found(
    reusing: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step goes on with zeros in its place."""
    prompt = [41 + i % 17 for i in range(21)]
    tokens = Continuation.tokens

    def fails(*_: Any) -> Any:
        monkeypatch.setattr(Continuation, "tokens", tokens)
        raise ValueError("its text cannot be read")

    monkeypatch.setattr(Continuation, "tokens", fails)
    assert send(reusing, prompt, **SHORT)[1].wait().last().error
    text, found = cached(reusing, prompt)
    assert found == 0
    assert cached(reusing, prompt) == (text, 20)


def test_a_failed_step_is_not_found_again(reusing: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, kind = [9 + i % 3 for i in range(16)], type(reusing.executor)
    text = cached(reusing, prompt)[0]
    assert cached(reusing, prompt)[1] == 12
    submit = kind.submit

    def fails(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(kind, "submit", submit)
        raise ValueError("a step fails")

    monkeypatch.setattr(kind, "submit", fails)
    assert send(reusing, prompt, **SHORT)[1].wait().last().error
    assert cached(reusing, prompt) == (text, 0), "who knows what it has written"


def test_counts_are_of_prompts_when_they_start(reusing: Engine) -> None:
    before = reusing.stats()
    prompt = [17 + i % 13 for i in range(18)]
    generate(reusing, [prompt, prompt[:10]], **SHORT)
    cached(reusing, prompt)
    send(reusing, prompt, tier=Tier.BEST_EFFORT, **SHORT)[1].wait()
    cached(reusing, prompt, prompt_logprobs=0)
    after = reusing.stats()

    def more(name: str) -> dict[str, int]:
        then, now = getattr(before, name), getattr(after, name)
        return {tier: now[tier] - then[tier] for tier in now}

    assert more("prefix_cache_queries") == {"realtime": 18 + 10 + 18, "best_effort": 18}
    hits = more("prefix_cache_hits")
    assert hits["realtime"] in (16, 16 + 8) and hits["best_effort"] == 16


def test_a_reset_has_all_forgotten_whoever_runs(reusing: Engine) -> None:
    prompt = [23 + i % 9 for i in range(16)]
    text = cached(reusing, prompt)[0]
    came: list[Output] = []

    def reset(output: Output) -> None:
        came.append(output)
        if len(came) == 8:
            reusing.reset_prefix_cache()

    long = send(reusing, prompt, reset, max_tokens=30, ignore_eos=True)[1].wait()
    assert long.tokens()[:12] == text, "who runs keeps what it reads"
    assert cached(reusing, prompt) == (text, 0)
    assert cached(reusing, prompt) == (text, 12), "what came after it is found"
    wait_until_idle(reusing)
    reusing.reset_prefix_cache()  # with nobody there
    assert cached(reusing, prompt) == (text, 0)
