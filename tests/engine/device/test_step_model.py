"""What a step is compiled with, by the platform that its pool lies on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.device.step_model import compiler_options
from jaxserve.pallas_kernels import format_of


@pytest.mark.parametrize(("platform", "told"), [("cuda", True), ("gpu", True), ("tpu", False)])
def test_gpus_are_told_to_compute_nothing_twice(platform: str, told: bool) -> None:
    devices = [SimpleNamespace(platform=platform)]
    pool_format: Any = SimpleNamespace(sharding=SimpleNamespace(device_set=devices))
    assert ("rematerialization" in compiler_options(pool_format).values()) == told


def test_a_cpu_is_told_nothing() -> None:
    assert jax.devices()[0].platform == "cpu"
    assert compiler_options(format_of(jnp.float32, jnp.zeros((2, 3)).sharding)) == {}
