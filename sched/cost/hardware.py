"""Rates and sizes of devices, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.sched.cost.model_shapes import Model

READ_EFFICIENCY = 0.94  # of memory bandwidth: llama-2-7b@a100's decode KV slope, 1.92 of 2.04 TB/s
# Share of the rate of the link to the host. Reported: 25 of an A100's 32 GB/s
# (github.com/ZaidQureshi/bam/issues/54), and 52.8 from, but 35 to, an H100 of 64 GB/s
# (github.com/NVIDIA/nvbandwidth/issues/24).
HOST_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Device:
    """`count` accelerators of one kind under tensor parallelism. Rates and sizes are per
    accelerator.

    Attributes:
        flops: Peak dense 16-bit FLOP/s.
        bandwidth: Memory bandwidth, bytes/s.
        memory: Bytes.
        link: Bytes/s sent to the other accelerators.
        host_bandwidth: Bytes/s to or from the host.
        count: Number of accelerators.
        kind: The device whose fitted efficiencies are used (`layers.figures_of`).
        measured: Whether the efficiencies were fitted to this very device.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    host_bandwidth: float
    count: int = 1
    kind: str = "a100"
    measured: bool = False


DEVICES = {
    # Data sheets: dense bf16 tensor FLOP/s, memory bytes/s and memory bytes. The links are half of
    # the published sum of both directions of NVLink (an L4 has PCIe 4.0 x16) or of the TPUs'
    # interconnect. To the host: PCIe x16 of generation 4 or 5; for TPUs, the numbers of "How to
    # Scale Your Model" (Google DeepMind, 2025, part 2).
    "a100": Device(312e12, 2.039e12, 80e9, 300e9, 32e9, measured=True),
    "a100-40g": Device(312e12, 1.555e12, 40e9, 300e9, 32e9),
    "h100": Device(989e12, 3.35e12, 80e9, 450e9, 64e9, kind="h100", measured=True),
    "h200": Device(989e12, 4.8e12, 141e9, 450e9, 64e9, kind="h100"),
    "l4": Device(121e12, 0.3e12, 24e9, 32e9, 32e9),
    "v5e": Device(197e12, 0.819e12, 16e9, 200e9, 16e9),
    "v5p": Device(459e12, 2.765e12, 95e9, 600e9, 16e9),
    "v6e": Device(918e12, 1.64e12, 32e9, 400e9, 32e9),
}


def moved_slot(model: Model, device: Device) -> dict[str, float]:
    """Coefficients of moves: seconds per layer to copy a slot of one plane in device memory, or to
    move it to or from the host. Devices share a slot by heads, each over its own link; of a latent
    vector each has its own copy."""
    plane = model.kv_bytes_on(device.count) / 2 / device.count
    return {
        "copied_slot": 2 * plane / (READ_EFFICIENCY * device.bandwidth),
        "swapped_slot": plane / (HOST_EFFICIENCY * device.host_bandwidth),
    }
