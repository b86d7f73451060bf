"""Models whose tokens see those behind them, too, make the vectors that transformers and
sentence-transformers make of them, whoever is beside; texts are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxserve.config import Config, ConfigError
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.startup.choices.model_options import for_model
from jaxserve.models.dense import sequence_logits
from jaxserve.models.registry import family_for
from jaxserve.sched.request import InvalidRequest, PoolingParams, PoolingType
from jaxserve.weights import load_config, load_params
from tests.engine.harness import engine, pool, send, vector
from tests.models.fixtures import REFERENCE, hf_config, hf_tensors, write_checkpoint

FIELDS = {"is_causal": False}
CASES = {
    "both_ways_qwen2": ("qwen2", FIELDS),
    "both_ways_window": ("qwen2_window", FIELDS),
    "both_ways_gemma3": ("gemma3", {"use_bidirectional_attention": True}),
}
WHOLE = {"lasttoken": PoolingType.LAST, "mean": PoolingType.MEAN, "cls": PoolingType.CLS}


def stored(name: str) -> tuple[list[list[int]], dict[str, np.ndarray]]:
    found = np.load(REFERENCE / "pooling" / f"{name}.npz")
    texts = [p[:n].tolist() for p, n in zip(found["prompts"], found["lengths"], strict=True)]
    return texts, found


@pytest.mark.parametrize("name", CASES)
def test_logits_are_transformers_own(name: str, tmp_path: Path) -> None:
    base, more = CASES[name]
    write_checkpoint(tmp_path, hf_config(base) | more, hf_tensors(hf_config(base)))
    family, config, _ = load_config(tmp_path)
    assert not config.causal
    params = load_params(tmp_path, family, config, dtype="float32")
    texts, found = stored(name)
    of = jax.jit(lambda text: sequence_logits(family, params, config, text, dtype=jnp.float32)[-1])
    for text, logits in [*zip(texts, found["logits"], strict=True)][-2:]:  # each is compiled
        assert np.asarray(of(np.array(text))) == pytest.approx(logits, abs=1e-4)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, (base, more) = tmp_path_factory.mktemp("both_ways"), CASES["both_ways_window"]
    write_checkpoint(folder, hf_config(base) | more, hf_tensors(hf_config(base)))
    Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    fields = {"scheduler__max_rows": 8, "engine__row_buckets": (8,)}
    fields |= {"scheduler__policy": "goodput", "cache__prefix_caching": True}  # as by default
    with engine(folder, model__load_format="auto", **fields) as running:
        yield running


def test_vectors_of_texts_beside_each_other(embedder: Engine) -> None:
    texts, found = stored("both_ways_window")
    streams = {
        mode: [pool(embedder, text, PoolingParams(kind)) for _ in range(3) for text in texts]
        for mode, kind in WHOLE.items()
    }
    for mode, each in streams.items():
        vectors = np.stack([vector(stream) for stream in each])
        assert vectors == pytest.approx(np.tile(found[mode], (3, 1)), abs=1e-5)
        alone = [vector(pool(embedder, text, PoolingParams(WHOLE[mode]))) for text in texts]
        np.testing.assert_array_equal(vectors, np.tile(alone, (3, 1)))


def test_nothing_is_found_of_another_text_that_begins_alike(embedder: Engine) -> None:
    texts, found = stored("both_ways_window")
    longer = texts[-1] + texts[-2]
    first = vector(pool(embedder, longer[: len(longer) - 1], PoolingParams(PoolingType.MEAN)))
    for _ in range(2):
        stream = pool(embedder, texts[-1], PoolingParams())
        assert vector(stream) == pytest.approx(found["lasttoken"][-1], abs=1e-5)
        usage = stream.last().usage
        assert usage is not None and usage.cached_tokens == 0
    assert np.isfinite(first).all()


def test_what_is_no_number_stays_its_own(embedder: Engine) -> None:
    """In the same step: what is masked adds nothing, even 0 times infinity."""
    texts, found = stored("both_ways_window")
    executor = embedder.executor
    whole = executor.params  # type: ignore[attr-defined]
    poisoned = whole.embed_tokens.at[0].set(jnp.nan)
    executor.params = whole.replace(embed_tokens=poisoned)  # type: ignore[attr-defined]
    try:
        broken = [pool(embedder, [5, 0, 9], PoolingParams()) for _ in range(4)]
        good = [pool(embedder, text, PoolingParams()) for text in texts]
        assert {one.wait().reason for one in broken} == {FinishReason.ERROR}
        assert np.stack([vector(one) for one in good]) == pytest.approx(
            found["lasttoken"], abs=1e-5
        )
    finally:
        executor.params = whole  # type: ignore[attr-defined]


def test_texts_are_refused(embedder: Engine) -> None:
    for sampling in ({"max_tokens": 3}, {"max_tokens": 1, "prompt_logprobs": 1}):
        with pytest.raises(InvalidRequest, match="it makes vectors only"):
            send(embedder, [5, 6, 7], **sampling)


def test_policies_that_compute_prompts_in_parts_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hf_config("qwen2") | FIELDS)
    given = Config().with_fields(model__path=str(tmp_path))
    model = load_config(str(tmp_path))[1]
    made = for_model(given, model)
    assert (made.scheduler.policy, made.cache.prefix_caching) == ("vllm", False)
    assert made.engine.max_model_len == min(64, made.scheduler.max_batch_tokens)
    with pytest.raises(ConfigError, match="computes prompts in parts"):
        for_model(given.with_fields(scheduler__policy="sarathi"), model)
    orca = given.with_fields(scheduler__policy="orca", engine__max_model_len=32)
    assert for_model(orca, model) == orca.with_fields(cache__prefix_caching=False)


def test_what_is_refused_by_name() -> None:
    for name, more in (
        ("gemma2", {"use_bidirectional_attention": True}),
        ("gemma3", {"use_bidirectional_attention": "vision"}),
        ("qwen2", {"is_causal": "no"}),
    ):
        with pytest.raises(ValueError, match=next(iter(more))):
            family_for(hf_config(name)).config_from_hf(hf_config(name) | more)
