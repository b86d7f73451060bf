"""Runs batches on the device: owns the parameters, the donated pool and the sampling state.

`submit` returns at once; `StepHandle.result` waits. One thread uses an executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.engine.buckets import Buckets
from jaxserve.engine.hidden import make_widen
from jaxserve.engine.layout import Layout
from jaxserve.engine.sampling import (
    SampleResult,
    SlotParams,
    admit,
    init_state,
    sample_full,
    sample_greedy,
    warm_up,
)
from jaxserve.engine.step_model import StepModel
from jaxserve.engine.steps import make_model_step
from jaxserve.models.base import Params
from jaxserve.pallas_kernels import row_major

_SAMPLE_GREEDY = jax.jit(sample_greedy, donate_argnums=0)
_SAMPLE_FULL = jax.jit(sample_full, donate_argnums=0)


@dataclass(frozen=True)
class StepHandle:
    """A launched step."""

    _result: SampleResult

    def result(self) -> SampleResult:
        """The sampled tokens as NumPy arrays, [R] of the step's layout. Waits for the device;
        raises what the device raised."""
        return jax.tree.map(np.asarray, self._result)


class JaxExecutor:
    """Every step of a model over its pool, compiled for the layouts of `buckets`."""

    def __init__(self, model: StepModel, params: Params, pool: jax.Array, buckets: Buckets) -> None:
        self.buckets = buckets
        self.params = params
        self.pool = pool
        self._mesh = model.mesh
        self._place: Any = jax.devices()[0] if model.mesh is None else _replicated(model.mesh)
        self._state = init_state(buckets.slots, model.config.vocab_size, model.mesh)
        self._step = make_model_step(model, row_major(pool.sharding))
        self._widen = make_widen(model, row_major(pool.sharding))

    def admit(self, slot: int, row: SlotParams) -> None:
        """Gives a device slot its request's sampling parameters, before the first step in it."""
        self._state = admit(self._state, slot, row)

    def submit(self, layout: Layout, packed: np.ndarray, *, full: bool) -> StepHandle:
        """Launches one step. packed: int32 [layout.size], not to be changed afterwards. full: some
        row samples with more than plain greedy."""
        with self._mesh or contextlib.nullcontext():
            batch = jax.device_put(packed, self._place)
            self.pool, logits = self._step(
                self.params, self.pool, self._state.last_token, batch, layout=layout
            )
            slots, emit = _sampling_fields(layout, packed)
            slots, emit = jax.device_put((slots, emit), self._place)
            sample = _SAMPLE_FULL if full else _SAMPLE_GREEDY
            self._state, result = sample(self._state, logits, slots, emit)
        for leaf in jax.tree.leaves(result):
            leaf.copy_to_host_async()
        return StepHandle(result)

    def widen(self, layout: Layout, packed: np.ndarray) -> None:
        """Makes K and V of the cached hidden vectors of the batch's tokens, those of K where the
        vectors were; see `batching.widening`."""
        with self._mesh or contextlib.nullcontext():
            batch = jax.device_put(packed, self._place)
            self.pool = self._widen(self.params, self.pool, batch, layout=layout)

    def warmup(self, progress: Callable[[Iterable[Any]], Iterable[Any]]) -> None:
        """Compiles and runs every step there is, on padding, so that none compiles later.

        progress: wraps the list of work, as tqdm does.
        """
        work = [(layout, False) for layout in self.buckets.all()]
        work += [(self.buckets.decode(rows), True) for rows in self.buckets.rows]
        self._state = warm_up(self._state)
        for layout, full in progress(work):
            self.submit(layout, layout.empty(), full=full).result()
        if self.buckets.hidden:
            layout = self.buckets.widening()
            self.widen(layout, layout.empty())


def _sampling_fields(layout: Layout, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    fields = layout.views(packed)
    return fields["slots"], fields["emit"] != 0


def _replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
