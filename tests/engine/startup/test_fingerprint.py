"""The system's fingerprint: of all that bits depend on, and of nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup import fingerprint
from jaxserve.engine.startup.blueprint import Blueprint
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.fingerprint import checksum, system_fingerprint
from jaxserve.models.base import Params
from jaxserve.models.registry import family_for
from jaxserve.offline.llm import LLM
from jaxserve.server.requests.templates.chat_template import ChatTemplate
from jaxserve.weights import load_params
from tests.engine.harness import SHAPES


def blueprint(path: Path, **fields: Any) -> Blueprint:
    usual = {"cache__block_size": 4, "cache__num_blocks": 64, "scheduler__max_prefill_tokens": 64}
    config = Config().with_fields(**{"model__path": str(path), **usual, **fields})
    return Blueprint.from_choices(choose(config), masked_sampling=False)


def params(name: str = "llama", seed: int = 0) -> Params:
    family = family_for(SHAPES[name])
    config, dtype = family.config_from_hf(SHAPES[name]), "float32"
    return load_params(None, family, config, dtype=dtype, load_format="random", seed=seed)


def test_two_starts_and_another_policy_have_one(roomy: Engine, shapes: dict[str, Path]) -> None:
    told = roomy.info().system_fingerprint
    assert told.startswith("fp_") and len(told) == 19
    assert LLM.over(roomy, ChatTemplate(None)).system_fingerprint == told
    other = blueprint(shapes["opt"], scheduler__policy="infermax", scheduler__max_rows=3)
    assert other.buckets != roomy.executor.buckets
    assert system_fingerprint(other, 1, checksum(params("opt"))) == told


@pytest.mark.parametrize(
    "fields",
    [
        {"model__dtype": "bfloat16"},
        {"model__quantization": "int8"},
        {"cache__dtype": "int8"},
        {"engine__attention_backend": "xla"},
        {"engine__max_model_len": 32},
    ],
    ids=str,
)
def test_what_bits_depend_on_is_in_it(shapes: dict[str, Path], fields: dict[str, Any]) -> None:
    usual, other = (blueprint(shapes["llama"], **more) for more in ({}, fields))
    assert system_fingerprint(usual, 1, "w") != system_fingerprint(other, 1, "w")


@pytest.mark.parametrize("name", ["_versions", "_sources", "_device"])
def test_nor_is_it_that_of_another_machine_or_version(
    shapes: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = blueprint(shapes["llama"])
    before = system_fingerprint(usual, 1, "w")
    assert len({before, *(system_fingerprint(usual, *a) for a in ((2, "w"), (1, "x")))}) == 3
    found = getattr(fingerprint, name)()
    assert found and json.dumps(found)
    changed = {**found, "numba": "0"} if isinstance(found, dict) else "0"
    monkeypatch.setattr(fingerprint, name, lambda: changed)
    assert system_fingerprint(usual, 1, "w") != before


def test_one_bit_of_the_weights_changes_their_checksum() -> None:
    usual = params()
    assert checksum(usual) == checksum(params()) != checksum(params(seed=1))
    leaves, tree = jax.tree.flatten(usual)
    bits = np.array(leaves[-1]).view(np.uint32)
    bits[-1] ^= 1
    changed = [*leaves[:-1], jax.numpy.asarray(bits.view(np.float32))]
    assert checksum(jax.tree.unflatten(tree, changed)) != checksum(usual)
