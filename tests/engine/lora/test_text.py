"""A request's text is that of its adapter merged into the model, whatever else is in the batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.engine.adapters import UnknownAdapter
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import AdapterError
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.offline.llm import LLM
from jaxserve.sched.request import PoolingParams, PoolingType, Request, SamplingParams
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from tests.engine import mixed_caches
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    Gate,
    Stream,
    engine,
    pool,
    prompts,
    send,
    vector,
    wait_until_idle,
)
from tests.engine.lora import peft
from tests.engine.test_quantized_text import write_wide

NAMES = ("one", "two", "three")
COUNT = 12  # prompts
FEW = ("q_proj", "v_proj", "fc2")
Expected = dict[str, list[list[int]]]
LORA = {"lora__max_loras": 4, "lora__max_rank": 32}


@pytest.fixture(scope="session")
def folders(shapes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of OPT: of all projections, of few, and of another rank and scale."""
    folder, base = tmp_path_factory.mktemp("adapters"), shapes["opt"]
    return {
        "one": peft.write(folder / "one", base),
        "two": peft.write(folder / "two", base, rank=20, seed=2, targets=FEW),
        "three": peft.write(folder / "three", base, rank=3, seed=3, use_rslora=True),
    }


@pytest.fixture(scope="session")
def merged(shapes: dict[str, Path], folders: dict[str, Path]) -> Expected:
    """What models with an adapter's product added to their weights say."""
    asked = prompts(COUNT), SAMPLING["max_tokens"]
    return {name: peft.merged_texts(shapes["opt"], f, *asked) for name, f in folders.items()}


@pytest.fixture(scope="session")
def running(shapes: dict[str, Path], folders: dict[str, Path]) -> Iterator[Engine]:
    """The engine that all tests here share, with all three."""
    fields: dict[str, Any] = {**LORA, "cache__prefix_caching": True}
    paths = {name: str(path) for name, path in folders.items()}
    with engine(shapes["opt"], **fields, lora__adapters=paths) as started:
        yield started


@pytest.fixture
def shared(running: Engine) -> Iterator[Engine]:
    running.reset_prefix_cache()
    yield running
    wait_until_idle(running)


def ask(on: Engine, wanted: Sequence[tuple[int, str]]) -> list[list[int]]:
    """What is said to (number of a prompt, name of an adapter), all at once."""
    asked = prompts(COUNT)
    streams = [send(on, asked[i], adapter=name, **SAMPLING)[1] for i, name in wanted]
    return [stream.wait().tokens() for stream in streams]


EACH = [(i, name) for i in range(COUNT) for name in ("", *NAMES)]


def expected(
    merged: Expected, alone: Texts, wanted: Sequence[tuple[int, str]] = EACH
) -> list[list[int]]:
    texts = {**merged, "": alone("opt")}
    return [texts[name][i] for i, name in wanted]


@pytest.mark.promise(10)
def test_mixed_batch(shared: Engine, merged: Expected, alone: Texts) -> None:
    assert ask(shared, EACH) == expected(merged, alone)
    assert merged["one"] != merged["two"] != merged["three"] != alone("opt")[:COUNT]


# What is done to the requests, in engines whose steps are shared where their shapes are.
TREATMENTS: dict[str, dict[str, Any]] = {
    "preempted in chunks": {**SCARCE, "scheduler__policy": "goodput"},
    "drafted": {"scheduler__policy": "sarathi+spec"},
}


@pytest.mark.promise(10)
@pytest.mark.parametrize(
    "treatment",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "drafted")) for name in TREATMENTS],
)
def test_treatment(
    shapes: dict[str, Path],
    folders: dict[str, Path],
    merged: Expected,
    alone: Texts,
    treatment: str,
) -> None:
    paths = {name: str(path) for name, path in folders.items()}
    fields = {**LORA, "lora__adapters": paths, **TREATMENTS[treatment]}
    with engine(shapes["opt"], **fields, cache__prefix_caching=True) as running:
        assert ask(running, EACH) == expected(merged, alone)
        assert ask(running, EACH) == expected(merged, alone), "with what the first ones left"
        assert (running.stats().preemptions > 0) == ("preempted" in treatment)


@pytest.mark.slow
def test_hidden_caches(
    shapes: dict[str, Path],
    folders: dict[str, Path],
    merged: Expected,
    alone: Texts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside rows with adapters, those without have hidden caches, which become K and V."""
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    paths = {name: str(path) for name, path in folders.items()}
    fields = {**LORA, "lora__adapters": paths, "scheduler__policy": "mixed_chunks"}
    mixed = random.Random(1).sample(EACH, len(EACH))  # who is hidden hangs on who comes when
    with engine(shapes["opt"], **fields, cache__rho="0") as running:
        assert ask(running, mixed) == expected(merged, alone, mixed)
        policy: Any = running._scheduler.policy
        assert policy.seen.hidden and policy.seen.projected and policy.seen.mixed
        assert running.info().hidden_read is not None


def test_vectors(
    shared: Engine,
    shapes: dict[str, Path],
    folders: dict[str, Path],
    merged: Expected,
    alone: Texts,
) -> None:
    """Of the last token, the mean and the first, of all in one batch, and again with what the first
    ones left; texts beside them stay."""
    prompt = max(prompts(COUNT), key=len)
    streams = [
        [pool(shared, prompt, PoolingParams(kind, normalize=False), name) for kind in PoolingType]
        for name in ("", *NAMES)
        for _ in range(2)
    ]
    assert ask(shared, EACH) == expected(merged, alone)
    again = pool(shared, prompt, PoolingParams(normalize=False), "two")
    states = {n: peft.merged_hidden(shapes["opt"], folders.get(n), prompt) for n in ("", *NAMES)}
    for number, found in enumerate(streams):
        of = states[("", *NAMES)[number // 2]]
        for stream, want in zip(found, (of[-1], of.mean(axis=0), of[0]), strict=True):
            assert vector(stream) == pytest.approx(want, abs=1e-4)
    assert vector(again) == pytest.approx(states["two"][-1], abs=1e-4)
    usage = again.last().usage
    assert usage is not None and usage.cached_tokens >= 16
    for one, other in itertools.combinations(states.values(), 2):
        assert abs(one[-1] - other[-1]).max() > 0.1, "the adapters are too alike to tell apart"


def cached_tokens(on: Engine, prompt: Sequence[int], name: str) -> tuple[list[int], int]:
    stream = send(on, prompt, adapter=name, **SAMPLING)[1].wait()
    usage = stream.last().usage
    assert usage is not None
    return stream.tokens(), usage.cached_tokens


def test_nobody_finds_what_another_adapter_computed(
    shared: Engine, folders: dict[str, Path], merged: Expected, alone: Texts
) -> None:
    number = next(i for i, prompt in enumerate(prompts(COUNT)) if len(prompt) > 16)
    prompt, texts = prompts(COUNT)[number], {**merged, "": alone("opt")}
    for name in ("", *NAMES):
        assert cached_tokens(shared, prompt, name) == (texts[name][number], 0)
    for name in ("", *NAMES):
        text, found = cached_tokens(shared, prompt, name)
        assert text == texts[name][number] and found >= 16
    shared.load_adapter("again", str(folders["one"]))
    assert cached_tokens(shared, prompt, "again")[1] >= 16, "the same numbers by another name"
    shared.unload_adapter("again")
    shared.load_adapter("again", str(folders["two"]))
    known = Request("known", tuple(prompt), SamplingParams(**SAMPLING), adapter="again")
    known = shared.with_keys(known)
    shared.unload_adapter("again")
    shared.load_adapter("again", str(folders["three"]))
    stream = Stream()
    shared.submit(known, stream)
    assert stream.wait().tokens() == merged["three"][number], "its keys were another adapter's"
    shared.unload_adapter("again")


@pytest.mark.slow
def test_latent_projections(shapes: dict[str, Path], tmp_path: Path) -> None:
    """Those that make queries, K and V by way of few numbers, and of the expert that all go to."""
    base, asked = shapes["deepseek"], prompts(4)
    folder = peft.write(tmp_path / "one", base)
    changed = peft.merged_texts(base, folder, asked, SAMPLING["max_tokens"])
    with engine(base, **LORA, lora__adapters={"one": str(folder)}) as running:
        streams = [send(running, p, adapter=n, **SAMPLING)[1] for p in asked for n in ("one", "")]
        texts = [stream.wait().tokens() for stream in streams]
    assert texts[::2] == changed
    assert texts[1::2] == peft.merged_texts(base, None, asked, SAMPLING["max_tokens"]) != changed


def test_unloading(shared: Engine, folders: dict[str, Path], merged: Expected) -> None:
    """Who runs goes on with what it began with; the slot is free after that."""
    prompt = prompts(1)[0]
    shared.load_adapter("fourth", str(folders["one"]))
    stream = send(shared, prompt, gate := Gate(), adapter="fourth", **SAMPLING)[1]
    gate.reached()
    shared.unload_adapter("fourth")
    with pytest.raises(UnknownAdapter, match="fourth"):
        send(shared, prompt, adapter="fourth", **SAMPLING)
    with pytest.raises(UnknownAdapter, match="fourth"):
        shared.unload_adapter("fourth")
    with pytest.raises(AdapterError, match=r"all 4 slots .* 1 of them still used"):
        shared.load_adapter("fifth", str(folders["two"]))
    gate.open()
    assert stream.wait().tokens() == merged["one"][0]
    wait_until_idle(shared)
    shared.load_adapter("fifth", str(folders["two"]))
    assert send(shared, prompt, adapter="fifth", **SAMPLING)[1].wait().tokens() == merged["two"][0]
    shared.unload_adapter("fifth")
    assert [one.name for one in shared.adapters()] == list(NAMES)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("one", "is loaded"), ("", "a name"), ("a/b", "a name"), ("a\0", "a name")],
)
def test_names(shared: Engine, folders: dict[str, Path], name: str, problem: str) -> None:
    with pytest.raises(AdapterError, match=problem):
        shared.load_adapter(name, str(folders["one"]))
    for other in ("\ud800", "x" * 8_000_000):
        with pytest.raises(AdapterError, match="a name") as caught:
            shared.load_adapter(other, str(folders["one"]))
        assert len(str(caught.value).encode()) < 300


def test_a_bad_one_leaves_its_slot(shared: Engine, tmp_path: Path) -> None:
    for _ in range(5):
        with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
            shared.load_adapter("bad", str(tmp_path))
    assert [one.name for one in shared.adapters()] == list(NAMES)


def test_offline(shared: Engine, folders: dict[str, Path], merged: Expected, alone: Texts) -> None:
    llm, asked = LLM.over(shared, ChatTemplate()), prompts(COUNT)[:3]
    params = SamplingParams(**SAMPLING)
    for name, texts in (("two", merged["two"]), ("", alone("opt"))):
        found = llm.generate(asked, params, adapter=name, progress=False)
        assert [one.outputs[0].token_ids for one in found] == texts[:3]
    llm.load_adapter("late", folders["one"])
    pieces = list(llm.stream(asked[0], params, adapter="late"))
    assert [token for piece in pieces for token in piece.token_ids] == merged["one"][0]
    llm.unload_adapter("late")
    with pytest.raises(UnknownAdapter, match="late"):
        llm.generate(asked[0], params, adapter="late", progress=False)


def test_an_engine_without(roomy: Engine, folders: dict[str, Path]) -> None:
    with pytest.raises(AdapterError, match=r"lora\.max_loras"):
        roomy.load_adapter("one", str(folders["one"]))
    with pytest.raises(UnknownAdapter):
        send(roomy, prompts(1)[0], adapter="one", **SAMPLING)
    assert not any(layout.lora for layout in roomy.executor.buckets.all())


@pytest.mark.slow
def test_quantised_base(shapes: dict[str, Path], folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights of few bits, and adapters beside them that are not."""
    wide = write_wide(tmp_path / "wide", shapes["opt"], "int8")
    paths = {name: str(path) for name, path in folders.items()}
    fields: dict[str, Any] = {**LORA, "lora__adapters": paths, "model__dtype": "float32"}
    wanted = EACH[:16]
    with engine(wide, model__load_format="safetensors", **fields) as running:
        want = ask(running, wanted)
    with engine(shapes["opt"], model__quantization="int8", **fields) as running:
        assert ask(running, wanted) == want
    assert len({tuple(text) for text in want}) == len(wanted)
