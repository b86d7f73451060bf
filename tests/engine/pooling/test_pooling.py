"""Vectors of prompts are what sentence-transformers makes of the same weights, whatever becomes of
a request on the way, and nobody beside it notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from jaxserve.engine.device.batch_layout import Layout, Rows
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.device.pooling_step import NOBODY, Wanted
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import Output
from jaxserve.engine.pooling import Pooling, pooled_pieces
from jaxserve.engine.sequence import Continuation
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.stats import StepRecorder
from jaxserve.sched.request import (
    NOTHING_SAMPLED,
    InvalidRequest,
    PoolingParams,
    PoolingType,
    Request,
    SamplingParams,
)
from tests.engine import mixed_caches
from tests.engine.conftest import Texts
from tests.engine.device.test_prompt_logprobs import TREATMENTS
from tests.engine.harness import (
    SAMPLING,
    engine,
    generate,
    pool,
    prompts,
    send,
    vector,
    wait_until_idle,
)
from tests.models.fixtures import REFERENCE, hf_config, hf_tensors, write_checkpoint

KINDS = (
    PoolingParams(),
    PoolingParams(PoolingType.MEAN),
    PoolingParams(PoolingType.CLS, normalize=False, dimensions=5),
    PoolingParams(scored_token_ids=(7, 3, 7)),
)
WHOLE = {mode: PoolingParams(kind) for mode, kind in zip(
    ("lasttoken", "mean", "cls"), PoolingType, strict=True
)}  # fmt: skip


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A checkpoint as sentence-transformers saves it: no head, though it is not tied, and names
    without the prefix."""
    folder, hf = tmp_path_factory.mktemp("embedder"), hf_config("qwen3")
    tensors = {name.removeprefix("model."): value for name, value in hf_tensors(hf).items()}
    write_checkpoint(folder, {**hf, "tie_word_embeddings": False}, tensors)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"type": f"sentence_transformers.models.{k}", "path": p} for p, k in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    mode = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    ends = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    ends.pre_tokenizer = Whitespace()
    ends.post_processor = TemplateProcessing(single="$A w2", special_tokens=[("w2", 2)])
    ends.save(str(folder / "tokenizer.json"))
    fields = {"model__load_format": "auto", "scheduler__max_prefill_tokens": 9}
    fields |= {"scheduler__max_rows": 8, "engine__row_buckets": (8,)}
    with engine(folder, **fields, cache__prefix_caching=True) as running:
        yield running


def test_what_sentence_transformers_makes_of_it(embedder: Engine) -> None:
    assert embedder.info().pooling == PoolingParams(PoolingType.MEAN)
    assert embedder.encode("w5 w7") == [5, 7, 2]
    stored = np.load(REFERENCE / "pooling" / "vectors.npz")
    texts = [p[:n].tolist() for p, n in zip(stored["prompts"], stored["lengths"], strict=True)]
    for mode, params in WHOLE.items():
        streams = [pool(embedder, text, params) for text in texts]
        found = np.stack([vector(stream) for stream in streams])
        assert found == pytest.approx(stored[mode], abs=1e-5)
    scored = (5, 0, 60)
    for text, logits in zip(texts, stored["logits"], strict=True):
        found = vector(pool(embedder, text, PoolingParams(scored_token_ids=scored)))
        assert found == pytest.approx(logits[list(scored)], abs=1e-4)


def test_prefixes_are_found_by_whom_they_suffice(embedder: Engine) -> None:
    text = [int(token) for token in np.random.default_rng(3).integers(3, 61, 30)]
    first = {mode: vector(pool(embedder, text, params)) for mode, params in WHOLE.items()}
    for mode, params in WHOLE.items():
        stream = pool(embedder, text, params)
        np.testing.assert_array_equal(vector(stream), first[mode])
        usage = stream.last().usage
        assert usage is not None
        assert (usage.cached_tokens > 0) == (mode == "lasttoken")


@pytest.fixture(scope="module")
def alone_vectors() -> dict[int, list[np.ndarray]]:
    return {}


def vectors(roomy: Engine, kept: dict[int, list[np.ndarray]]) -> dict[int, list[np.ndarray]]:
    """By kind, of each of `prompts()`, with nothing beside it."""
    for number, params in enumerate(KINDS):
        if number not in kept:
            kept[number] = [vector(pool(roomy, prompt, params)) for prompt in prompts()]
    return kept


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_whatever_becomes_of_the_cache(
    shapes: dict[str, Path],
    alone: Texts,
    roomy: Engine,
    alone_vectors: dict[int, list[np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    treatment: str,
) -> None:
    """A prompt that is computed again counts nothing twice, one that is not leaves nothing out, and
    the texts of others stay as they are."""
    texts, expected = alone("opt"), vectors(roomy, alone_vectors)
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)
    with engine(shapes["opt"], **TREATMENTS[treatment]) as running:
        begun, found = [], []
        # A mean is what a token that is counted twice shows in.
        kinds = [1] if treatment == "preempted in chunks" else range(len(KINDS))
        for number, prompt in enumerate(prompts()):
            begun.append(send(running, prompt, **SAMPLING)[1])
            found.append(pool(running, prompt, KINDS[kinds[number % len(kinds)]]))
        assert [stream.wait().tokens() for stream in begun] == texts
        for number, stream in enumerate(found):
            of = expected[kinds[number % len(kinds)]][number]
            # With hidden caches q, k and v are products of their own.
            ends = 0 if running.info().hidden_read is None else 1e-5
            np.testing.assert_allclose(vector(stream), of, rtol=0, atol=ends)
        if treatment == "preempted in chunks":
            usages = [stream.last().usage for stream in found]
            assert any(usage is not None and usage.preemptions for usage in usages)
        assert running.stats().preemptions


def test_it_is_one_output_step_for_all_who_count(roomy: Engine) -> None:
    steps = StepRecorder()
    roomy.add_observer(steps)
    last = pool(roomy, prompts()[1], KINDS[1]).wait().last()
    wait_until_idle(roomy)
    (step,) = steps.steps
    assert (step.num_emitting, step.num_prefill_tokens) == (1, len(prompts()[1]))
    assert last.usage is not None and last.usage.output_tokens == 1
    assert last.timings is not None and last.timings.ttft <= last.timings.total


def test_others_take_the_step_that_they_always_take(
    roomy: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, ran = cast(JaxExecutor, roomy.executor), []
    program = executor._pool_states

    def counted(*given: Any) -> Any:
        ran.append(np.asarray(given[3]))
        return program(*given)

    monkeypatch.setattr(executor, "_pool_states", counted)
    generate(roomy, prompts(8), **SAMPLING)
    assert not ran
    beside = send(roomy, prompts()[0], **SAMPLING)[1]
    vector(pool(roomy, prompts()[1], KINDS[1]))
    beside.wait()
    (places,) = ran
    assert np.count_nonzero(places != NOBODY) == len(prompts()[1])


def test_numbers_that_are_none_stay_with_whom_they_are_of(roomy: Engine) -> None:
    executor = cast(JaxExecutor, roomy.executor)
    layout = executor.buckets.mixed(64)
    hidden = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    wanted = Wanted.nothing(layout)
    wanted.places[:10], wanted.places[10:15] = 0, 1
    logits = jnp.zeros((layout.rows, 96))

    def pooled(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = executor._pool_states(executor.params, jnp.asarray(hidden), logits, *wanted)
        return np.asarray(found.sums), np.asarray(found.finite)

    whole, finite = pooled(hidden)
    assert finite.all()
    hidden[12, 3], hidden[20] = np.inf, np.nan  # of the second, and of padding
    broken, finite = pooled(hidden)
    assert not finite[1] and finite[0] and finite[2:].all()
    assert np.array_equal(broken[0], whole[0])
    assert not whole[2:].any() and not broken[2:].any()


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("dimensions", {"dimensions": 33}),
        ("dimensions", {"dimensions": 0}),
        ("dimensions", {"dimensions": 10**400}),
        ("tokens", {"scored_token_ids": (96,)}),
        ("tokens", {"scored_token_ids": (-1,)}),
        ("tokens", {"scored_token_ids": (1,) * 17}),
    ],
)
def test_what_is_refused(roomy: Engine, field: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        pool(roomy, [5], PoolingParams(**params))
    assert error.value.field_name == field


def test_nothing_is_sampled_beside_it() -> None:
    with pytest.raises(InvalidRequest):
        Request("a", (1,), SamplingParams(max_tokens=1, n=2), pooling=KINDS[0])


@given(st.data())
def test_each_token_is_counted_once(data: st.DataObject) -> None:
    """However the prompt is cut into steps, and however often some of its cache is lost."""
    length = data.draw(st.integers(1, 12))
    kind = data.draw(st.sampled_from(list(PoolingType)))
    request = Request("a", (9,) * length, NOTHING_SAMPLED, pooling=PoolingParams(kind))
    text: Any = None
    row: Any = None

    def heard(output: Output) -> None:
        raise AssertionError(output)

    member = Continuation(request, 0, 0, 0, text, row, heard)
    cached, found = 0, list[int]()
    while cached < length:
        if cached and data.draw(st.booleans()):
            cached = data.draw(st.integers(0, cached - 1))
        end = data.draw(st.integers(cached + 1, length))
        layout, other = Layout(32, 4, 1, 4, False), data.draw(st.integers(1, 9))
        step: Any = SimpleNamespace(start=np.array([0, cached]), end=np.array([other, end]))
        rows = Rows(np.array([other, end - cached]), np.array([0, cached]), np.zeros((2, 2, 1)))
        batch = layout.pack(rows)
        nobody = Continuation(Request("b", (1, 2)), 0, 1, 1, text, row, heard)
        pooling = Pooling.of_step(pooled_pieces([nobody, member], step), step, layout, batch)
        if pooling is not None:
            begin = int(layout.views(batch.buffer)["query_start"][batch.order.tolist().index(1)])
            found += [cached + at - begin for at in np.flatnonzero(pooling.wanted.places == 0)]
            assert set(np.unique(pooling.wanted.places)) <= {0, NOBODY}
        cached = end
    assert found == {
        PoolingType.LAST: [length - 1],
        PoolingType.MEAN: list(range(length)),
        PoolingType.CLS: [0],
    }[kind]  # fmt: skip
    assert member.next_pooled_token is None
