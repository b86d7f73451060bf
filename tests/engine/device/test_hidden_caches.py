"""Hidden caches never change greedy text: absorbed or projected, beside KV caches, switching."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import ConfigError
from jaxserve.engine.device import buckets
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.startup.choices import memory_choice, policy_choice
from jaxserve.engine.startup.choices.model_options import choose_read
from jaxserve.models.registry import family_for
from jaxserve.weights import load_config
from tests.engine import mixed_caches
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    SHAPES,
    Stream,
    engine,
    generate,
    prompts,
    send,
)
from tests.models.fixtures import hf_config

CHUNKS, WHOLE = "mixed_chunks", "mixed_whole"
MHA = {"num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "opt": SHAPES["opt"],
    "llama": SHAPES["llama"] | MHA | {"num_hidden_layers": 1},
    "qwen3": SHAPES["llama"] | MHA | {"model_type": "qwen3", "head_dim": 8},
}


@pytest.fixture(autouse=True)
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_choice, "make_policy", mixed_caches.make)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, shape in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(shape))
    return found


def hybrid(folder: Path, policy: str, **fields: Any) -> Any:
    return engine(folder, scheduler__policy=policy, cache__rho="0", **fields)


def seen(running: Engine) -> mixed_caches.Seen:
    policy = running._scheduler.policy
    assert hasattr(policy, "seen")
    found: mixed_caches.Seen = policy.seen
    return found


@functools.cache
def kv_texts(folder: Path, **fields: Any) -> list[list[int]]:
    """What KV caches give, from an engine of the same shapes."""
    with engine(folder, **fields) as running:
        return generate(running, prompts(), **SAMPLING)


def test_both_kinds_at_once(folders: dict[str, Path]) -> None:
    """In chunks, out of memory at times, so that requests come back with the other kind."""
    expected = kv_texts(folders["opt"], **SCARCE)
    fields: dict[str, Any] = {"cache__hidden_read": "absorbed", **SCARCE}
    with hybrid(folders["opt"], CHUNKS, scheduler__max_prefill_tokens=7, **fields) as running:
        assert running.info().hidden_read == "absorbed" and running.info().rho == 0.0
        assert not running._scheduler.view.projects
        assert generate(running, prompts(), **SAMPLING) == expected
        happened = seen(running)
        assert happened.mixed and happened.projected and running.stats().preemptions


def told(streams: list[Stream]) -> list[list[tuple[int, list[tuple[int, int]]]]]:
    """Tokens, and the bits of their log-probabilities."""

    def bits(entry: TokenLogprobs) -> list[tuple[int, int]]:
        values = np.array([value for _, value in entry.top], np.float32).view(np.uint32)
        return list(zip((token for token, _ in entry.top), values.tolist(), strict=True))

    return [
        [(one.token_id, bits(one)) for output in stream.wait().outputs for one in output.logprobs]
        for stream in streams
    ]


@pytest.mark.promise(45)
@pytest.mark.parametrize(
    ("model", "cache"),
    [pytest.param("opt", "int8", marks=pytest.mark.slow), ("qwen3", "float32")],
)
def test_log_probabilities_do_not_tell_the_cache(
    folders: dict[str, Path], model: str, cache: str
) -> None:
    """The same bits with K and V, with hidden vectors, and with one that has become the other."""
    given = {"cache__dtype": cache, "cache__hidden_read": "projected", **SCARCE}
    asked = {**SAMPLING, "logprobs": 3}
    with hybrid(folders[model], CHUNKS, scheduler__max_prefill_tokens=7, **given) as running:
        together = told([send(running, prompt, **asked)[1] for prompt in prompts()])
        send(running, [5], **SAMPLING)[1].wait()  # who begins hidden begins as KV now
        alone = [told([send(running, prompt, **asked)[1]])[0] for prompt in prompts()]
        happened = seen(running)
        assert happened.mixed and happened.projected and running.stats().preemptions
        assert running._scheduler.view.projects
    assert together == alone
    assert len(together[0]) == SAMPLING["max_tokens"]


def test_steps_fitted_to_few_hidden_rows_and_to_nothing_else(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accelerators have them."""
    expected = kv_texts(folders["opt"], **SCARCE)
    monkeypatch.setattr(memory_choice, "UNFITTED", frozenset())
    with hybrid(folders["opt"], CHUNKS, scheduler__max_prefill_tokens=7, **SCARCE) as running:
        assert any(not layout.kv for layout in running.executor.buckets.all())
        assert generate(running, prompts(), **SAMPLING) == expected
        assert seen(running).mixed


def test_long_caches_are_widened_in_pieces(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More cached tokens than become K and V at once; rotated keys, blocks of 16, no overlap."""
    monkeypatch.setattr(buckets, "PROJECTED_TOKENS", 16)
    fields = {
        "cache__block_size": 16,
        "scheduler__max_rows": 8,
        "engine__token_buckets": (16, 64),
        "engine__overlap": False,
    }
    expected = kv_texts(folders["llama"], **fields)
    with hybrid(folders["llama"], WHOLE, **fields) as running:
        assert running.info().hidden_read == "projected"
        executor, pieces = running.executor, []
        project_to_kv = executor.project_to_kv
        monkeypatch.setattr(
            executor, "project_to_kv", lambda *to: (pieces.append(to), project_to_kv(*to))
        )
        assert generate(running, prompts(), **SAMPLING) == expected
        assert seen(running).mixed
        # No two caches of ENOUGH tokens fit into one piece.
        assert len(pieces) > seen(running).projected > 0


def test_grouped_queries_keep_kv_and_it_is_said(
    shapes: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    _, config, _ = load_config(str(shapes["llama"]))
    with caplog.at_level(logging.INFO):
        assert choose_read("auto", CHUNKS, mixed_caches.make(CHUNKS), config) is None
    (said,) = caplog.records
    assert "no hidden caches, all are KV" in said.getMessage()
    assert "no fewer than the 32 of K and V" in said.getMessage()
    with pytest.raises(ConfigError, match="hidden_read=projected: a hidden vector has 32"):
        choose_read("projected", CHUNKS, mixed_caches.make(CHUNKS), config)


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("opt", {"cache__hidden_read": "folded"}, "must be auto or one of absorbed, projected"),
        ("llama", {"cache__hidden_read": "absorbed"}, "rotates its keys .* use projected"),
        ("opt", {"cache__rho": "much"}, "cache.rho must be auto or a number of seconds"),
        ("opt", {"cache__rho": "nan"}, "cache.rho must be auto or a number of seconds"),
        (
            "opt",
            {"cache__hidden_read": "absorbed", "scheduler__policy": "sarathi"},
            "cache.hidden_read=absorbed: scheduler.policy=sarathi keeps KV caches only",
        ),
        (
            "opt",
            {"cache__rho": "0", "scheduler__policy": "sarathi"},
            "cache.rho=0: there are no hidden caches",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    folders: dict[str, Path], model: str, fields: dict[str, Any], message: str
) -> None:
    with (
        pytest.raises(ConfigError, match=message),
        engine(folders[model], **{"scheduler__policy": CHUNKS, **fields}),
    ):
        pass


def test_models_whose_keys_are_made_otherwise_keep_kv(caplog: pytest.LogCaptureFixture) -> None:
    hf = hf_config("gemma3") | {"num_key_value_heads": 4}
    config = family_for(hf).config_from_hf(hf)
    policy = mixed_caches.make(CHUNKS)
    with caplog.at_level(logging.INFO):
        assert choose_read("auto", CHUNKS, policy, config) is None
    assert "its layers differ in rotation or window" in caplog.text
    with pytest.raises(ConfigError, match="hidden_read=projected: its layers differ"):
        choose_read("projected", CHUNKS, policy, config)
