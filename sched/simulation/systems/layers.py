"""What a layer takes beside its attention: its matrices, its element-wise operators, and the two
all-reduces of tensor parallelism.

The time is linear in the tokens of a step, as cost models have it. How close a kind of device gets
to its data sheet is fitted to measured tables (`fitted_devices.json`, which says whose and how).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.sched.simulation.systems.hardware import Device, Model

FIGURES = Path(__file__).with_name("fitted_devices.json")


@dataclass(frozen=True)
class LayerWork:
    """One layer's work on one of several devices that share it, in bytes and FLOPs, 16-bit.

    weights: bytes of its matrices, read once a step. The others are a token's: flops of its
    matrices; elementwise: bytes that norms, the residual, rotations and the activation read and
    write; exchanged: bytes that a device sends in both of a layer's ring all-reduces.
    """

    weights: float
    flops: float
    elementwise: float
    exchanged: float

    @classmethod
    def from_model(cls, model: Model, devices: int) -> LayerWork:
        """The model's, over so many devices. Every device has the norms and the residual whole."""
        share = model.layer_params / devices
        whole = 7 * model.d_model  # two norms and a sum, read and written
        rotated = 2 * (model.heads + model.kv_heads) * model.head_dim if model.rotary else 0
        activated = (3 if model.gated else 2) * model.d_ff
        hops = 2 * (devices - 1) / devices
        return cls(
            weights=2 * share,
            flops=2 * share,
            elementwise=2 * (whole + (rotated + activated) / devices),
            exchanged=2 * hops * 2 * model.d_model,
        )


@dataclass(frozen=True)
class Figures:
    """How a kind of device gets through a layer. kernels: seconds a layer that its kernels take
    whatever they do. read, matmul, elementwise, link: shares of the data sheet's memory bandwidth,
    FLOP/s, memory bandwidth again, and bandwidth between devices. all_reduce: by number of
    devices, ascending, seconds of an all-reduce of nothing."""

    kernels: float
    read: float
    matmul: float
    elementwise: float
    link: float
    all_reduce: dict[int, float]

    def latency(self, devices: int) -> float:
        """Seconds of an all-reduce among so many: between measured numbers on a line, beyond
        them that of the nearest."""
        if devices == 1:
            return 0.0
        return float(np.interp(devices, [*self.all_reduce], [*self.all_reduce.values()]))

    def seconds(self, work: LayerWork, device: Device) -> tuple[float, float]:
        """Of a layer: a step's, and a token's."""
        step = self.kernels + work.weights / (self.read * device.bandwidth)
        token = work.flops / (self.matmul * device.flops)
        token += work.elementwise / (self.elementwise * device.bandwidth)
        token += work.exchanged / (self.link * device.link)
        return step + 2 * self.latency(device.count), token


@cache
def figures_of(kind: str) -> Figures:
    """Those that were fitted for a kind of device, by its name. KeyError if there are none."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))["devices"][kind]
    latencies = {int(count): seconds for count, seconds in found.pop("all_reduce").items()}
    return Figures(**found, all_reduce=latencies)
