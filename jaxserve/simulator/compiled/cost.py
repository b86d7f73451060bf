"""Batch times of the compiled simulation: the cost models' own functions, compiled."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import fields
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cost.cost_model import (
    BatchFeatures,
    Coefficients,
    InferMaxCostModel,
    LinearCostModel,
)
from jaxserve.simulator.compiled.jit import kernel
from jaxserve.simulator.compiled.state import Machine

Prices = namedtuple("Prices", [field.name for field in fields(Coefficients)])  # type: ignore[misc]
_linear_time = kernel(LinearCostModel.batch_time)
_paper_time = kernel(InferMaxCostModel.batch_time)


class Linear(NamedTuple):
    """A `LinearCostModel` for numba.

    Attributes:
        coefficients: Seconds a layer, by the names of `Coefficients`.
        num_layers: Layers.
        overlapped: Whether copies to and from the host overlap the batch.
        num_experts, experts_per_token: See `LinearCostModel`.
    """

    coefficients: Prices
    num_layers: int
    overlapped: bool
    num_experts: int
    experts_per_token: int


class Paper(NamedTuple):
    """An `InferMaxCostModel` for numba.

    Attributes:
        linear: The linear part.
        residual: Residual connection, see `InferMaxCostModel`.
        attention_factor: Factor of attention terms for batches with several requests of a kind.
    """

    linear: Linear
    residual: tuple[float, float, float]
    attention_factor: float


class Costs(NamedTuple):
    """The cost model, padding and scatter of a setting, for numba.

    Attributes:
        paper: The model if is_paper; otherwise only its `linear` counts.
        is_paper: Whether the model is an `InferMaxCostModel`.
        rows, tokens: Sizes of the padding, empty for none.
        decode_group, decode_chunk: See `Padding`.
        factors, bounds, host: See `Scatter`, empty for none.
        lots: int64 [2, LOTS], see `Scatter.lots`; empty for none.
    """

    paper: Paper
    is_paper: bool
    rows: np.ndarray
    tokens: np.ndarray
    decode_group: int
    decode_chunk: int
    factors: np.ndarray
    bounds: np.ndarray
    host: np.ndarray
    lots: np.ndarray


@kernel
def features(m: Machine, costs: Costs) -> BatchFeatures:
    """The features of the planned batch, before it is booked."""
    me = m.me[0]
    tokens = decodes = kv = quad = cached = 0
    sampling = False
    for i in range(me.chosen):
        r = m.requests[m.chosen[i]]
        tokens += r.tokens
        sampling |= not r.greedy and r.computed + r.tokens == r.prompt_len + r.generated
        if r.decoding:
            m.scratch[decodes] = r.computed + 1
            decodes += 1
            kv += r.computed + 1
        else:
            quad += r.tokens * (r.tokens + 2 * r.computed)
            cached += r.computed
    padded, rows = tokens, me.chosen
    if len(costs.rows):
        padded = _next(costs.rows if tokens == me.chosen else costs.tokens, tokens)
        rows = _next(costs.rows, padded)
        group = min(costs.decode_group, rows)
        if group > 1:
            kv = _read_in_groups(m.scratch[:decodes], group, costs.decode_chunk)
    sampled = rows if sampling else 0
    prefills = me.chosen - decodes
    none = (0, 0, 0, 0, 0, 0)  # hidden caches and moves
    return BatchFeatures(tokens, padded, kv, decodes, quad, prefills, cached, *none, sampled, 0)


@kernel
def batch_time(costs: Costs, batch: BatchFeatures) -> float:
    """Seconds."""
    if costs.is_paper:
        return _paper_time(costs.paper, batch)
    return _linear_time(costs.paper.linear, batch)


@kernel
def prefill_time(costs: Costs, cached: int, length: int, chunk: int) -> float:
    """Seconds of the steps that compute the rest of a prompt (`sched/cost/reachability.py`).

    Args:
        costs: Costs of a setting.
        cached: Cached tokens.
        length: Length of the prompt.
        chunk: Tokens per step.
    """
    seconds = 0.0
    while cached < length:
        count = min(chunk, length - cached)
        padded = count
        if len(costs.rows):
            padded = _next(costs.rows if count == 1 else costs.tokens, count)
        quad, none = count * (count + 2 * cached), (0, 0, 0, 0, 0, 0)
        seconds += batch_time(
            costs, BatchFeatures(count, padded, 0, 0, quad, 1, cached, *none, 0, 0)
        )
        cached += count
    return seconds


@kernel
def scattered(costs: Costs, lot: int, batch: BatchFeatures, seconds: float) -> float:
    """The batch time with its deviation from the cost model.

    Args:
        costs: With the scatter.
        lot: Number of the batch in the draws.
        batch: Its features.
        seconds: Its time by the cost model.
    """
    if not len(costs.host):
        return seconds
    prompts, size = 1 if batch.num_prefills else 0, 0
    while size < costs.bounds.shape[1] and seconds >= costs.bounds[prompts, size]:
        size += 1
    kind = size + prompts * (costs.bounds.shape[1] + 1)
    return float(seconds * costs.factors[kind, costs.lots[0, lot % costs.lots.shape[1]]])


@kernel
def pace(costs: Costs, lot: int) -> float:
    """Factor on the host's times around a batch. lot: number of the batch in the draws."""
    if not len(costs.host):
        return 1.0
    return float(costs.host[costs.lots[1, lot % costs.lots.shape[1]]])


@kernel
def _next(sizes: np.ndarray, size: int) -> int:
    """Rounds up like `Padding`."""
    place = 0
    while place < len(sizes) - 1 and sizes[place] < size:
        place += 1
    return int(sizes[place])


@kernel
def _read_in_groups(lengths: np.ndarray, group: int, chunk: int) -> int:
    """`Padding.read`: sorted, each row of a group as long as the longest, in whole chunks, the last
    group full."""
    for i in range(1, len(lengths)):
        length, to = lengths[i], i
        while to > 0 and lengths[to - 1] > length:
            lengths[to] = lengths[to - 1]
            to -= 1
        lengths[to] = length
    total = 0
    for i in range(len(lengths) - 1, -1, -group):
        total += (lengths[i] + chunk - 1) // chunk * chunk
    return total * group
