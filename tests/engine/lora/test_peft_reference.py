"""Adapters that PEFT itself saved: its logits are ours, by a kernel or without, beside others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.dense import sequence_logits
from jaxserve.models.lora import (
    BASE,
    LoraSlots,
    adapter_specs,
    empty_adapter,
    make_adapters,
    make_put,
    with_adapters,
)
from jaxserve.pallas_kernels.backends import compiling_for
from jaxserve.weights.lora import load_adapter
from tests.compiling import OPTIMISED
from tests.models.fixtures import REFERENCE, load_reference

TOLERANCE = 1e-4
SLOTS = LoraSlots(3, 16)
CASES = {"llama2_all": "llama2", "opt_rslora": "opt"}


def test_all_are_compared() -> None:
    assert {path.parent.name for path in REFERENCE.glob("peft/*/logits.npz")} == CASES.keys()


@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, backend: str) -> None:
    base, folder = load_reference(CASES[name]), REFERENCE / "peft" / name
    family, config = base.family, base.config
    stored = np.load(folder / "logits.npz")
    assert np.abs(stored["logits"] - base.logits).max() > 1, "the adapter does something"
    loaded = load_adapter(folder, family, config, SLOTS, fused=True, dtype=np.float32)
    adapters = make_adapters(
        adapter_specs(family, config, SLOTS, fused=True), np.dtype(np.float32), None
    )
    put = make_put(adapters)
    overflowing = jax.tree.map(lambda part: part + np.float32(3e38), empty_adapter(adapters, 16))
    adapters = put(adapters, overflowing, np.int32(1), np.int32(0))
    adapters = put(adapters, loaded.arrays, np.int32(3), np.int32(16))

    def logits(tokens: jax.Array, numbers: jax.Array, *, width: int) -> jax.Array:
        params = with_adapters(base.params, adapters, numbers, width)
        return sequence_logits(family, params, config, tokens)

    with compiling_for(backend):
        for width in (32, 48):
            run = jax.jit(functools.partial(logits, width=width), compiler_options=OPTIMISED)
            for tokens, want, without in zip(
                stored["tokens"], stored["logits"], base.logits, strict=True
            ):
                for number, expected in ((3, want), (BASE, without)):
                    got = run(tokens, jnp.full(len(tokens), number, jnp.int32))
                    np.testing.assert_allclose(got, expected, atol=TOLERANCE, rtol=0)
