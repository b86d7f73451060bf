"""Steps of the sampler, jitted once for all tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from jaxserve.engine.device.sampling import SampleResult, sample_full, sample_greedy
from jaxserve.engine.device.sampling_state import RequestRow, SamplingState, admit
from jaxserve.sched.request import Request, SamplingParams

V, S, R = 40, 9, 6
EOS = (2,)
full = jax.jit(sample_full, donate_argnums=0)


@partial(jax.jit, donate_argnums=0)
def greedy(
    state: SamplingState, logits: np.ndarray, slots: np.ndarray, emit: np.ndarray
) -> tuple[SamplingState, SampleResult]:
    newest, tokens = sample_greedy(state.newest, logits, slots, emit)  # type: ignore[arg-type]
    return state.after(newest), SampleResult(tokens)


def request(prompt: Sequence[int] = (1,), name: str = "r", **sampling: object) -> Request:
    return Request(id=name, prompt=tuple(prompt), sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


def enter(
    state: SamplingState,
    slot: int,
    one: Request | RequestRow,
    output: Sequence[int] = (),
    index: int = 0,
) -> SamplingState:
    row = one if isinstance(one, RequestRow) else RequestRow(one, state.vocab_size, EOS)
    return admit(state, slot, row.slot_params(index, output))


def step(
    state: SamplingState,
    logits: np.ndarray,
    slots: Sequence[int],
    emit: Sequence[bool] | None = None,
    rows: int = R,
) -> tuple[SamplingState, SampleResult]:
    """One batch of `slots`, padded to `rows`."""
    more = rows - len(slots)
    logits = np.concatenate([logits, np.full((more, logits.shape[1]), 7.0)]).astype(np.float32)
    padded = np.array([*slots, *[state.num_slots] * more], np.int32)
    emitting = np.array([*(emit or [True] * len(slots)), *[True] * more])
    return full(state, logits, padded, emitting)


def seed_key(seed: int) -> tuple[int, int]:
    return seed >> 32, seed & 0xFFFFFFFF
