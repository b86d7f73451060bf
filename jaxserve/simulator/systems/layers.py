"""The time of a layer beside its attention: its matrices, its element-wise operators, and the two
all-reduces of tensor parallelism.

The time is linear in the tokens of a step, as cost models assume. How close a kind of device gets
to its data sheet is fitted to measured tables (`fitted_devices.json` names them and the method).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.cost.hardware import Device
from jaxserve.sched.cost.model_shapes import Model

FIGURES = Path(__file__).with_name("fitted_devices.json")


@dataclass(frozen=True)
class LayerWork:
    """One device's share of the work of a layer, in bytes and FLOPs; 16-bit except for weights.

    Attributes:
        weights: Bytes of its matrices, read once per step, without experts.
        flops: FLOPs of its matrices per token.
        elementwise: Bytes that norms, residual, rotations and activation read and write per token.
        exchanged: Bytes that a device sends per token in the layer's two ring all-reduces.
        expert: Bytes of one expert's matrices; 0 without experts.
    """

    weights: float
    flops: float
    elementwise: float
    exchanged: float
    expert: float = 0.0

    @classmethod
    def from_model(cls, model: Model, devices: int) -> LayerWork:
        """The model's layer, sharded over `devices`. Norms and residual are replicated."""
        attention, each = model.attention_params, model.feed_forward_params
        ways = model.experts_per_token or 1  # feed-forwards of a token
        always = (attention + (0 if model.experts else each)) / devices
        used = (attention + ways * each) / devices
        whole = 7 * model.d_model  # two norms and a sum, read and written
        rotated = 2 * (model.heads + model.kv_heads) * model.head_dim if model.rotary else 0
        activated = model.matrices * (ways * model.d_ff + model.shared_d_ff)
        hops = 2 * (devices - 1) / devices
        return cls(
            weights=model.weight_bytes * always,
            flops=2 * used,
            elementwise=2 * (whole + (rotated + activated) / devices),
            exchanged=2 * hops * 2 * model.d_model,
            expert=model.weight_bytes * each / devices if model.experts else 0.0,
        )


@dataclass(frozen=True)
class Figures:
    """How efficiently a kind of device runs a layer. Efficiencies are shares of the data sheet's
    rates.

    Attributes:
        kernels: Fixed seconds per layer for its kernels.
        read: Share of memory bandwidth when reading weights.
        matmul: Share of FLOP/s.
        elementwise: Share of memory bandwidth, in element-wise operators.
        link: Share of the bandwidth between devices.
        all_reduce: Latency of an all-reduce in seconds, by number of devices, ascending.
    """

    kernels: float
    read: float
    matmul: float
    elementwise: float
    link: float
    all_reduce: dict[int, float]

    def latency(self, devices: int) -> float:
        """Latency of an all-reduce among `devices`, seconds. Interpolated between measured numbers
        of devices, constant beyond them."""
        if devices == 1:
            return 0.0
        return float(np.interp(devices, [*self.all_reduce], [*self.all_reduce.values()]))

    def reading(self, weights: float, device: Device) -> float:
        """Seconds to read this many bytes of weights."""
        return weights / (self.read * device.bandwidth)

    def seconds(self, work: LayerWork, device: Device) -> tuple[float, float]:
        """Seconds of a layer: per step, and added for each token."""
        step = self.kernels + self.reading(work.weights, device)
        token = work.flops / (self.matmul * device.flops)
        token += work.elementwise / (self.elementwise * device.bandwidth)
        token += work.exchanged / (self.link * device.link)
        return step + 2 * self.latency(device.count), token


@cache
def figures_of(kind: str) -> Figures:
    """The fitted figures of a kind of device. Raises KeyError if there are none."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))["devices"][kind]
    latencies = {int(count): seconds for count, seconds in found.pop("all_reduce").items()}
    return Figures(**found, all_reduce=latencies)
