"""The devices to compile for: one JSON file each under targets/."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "targets"

Number = int | float


class TargetError(ValueError):
    """An unknown target, or one without a group that large."""


@dataclass(frozen=True)
class Target:
    """One kind of device.

    Attributes:
        name: Name of its file under targets/.
        platform: "cuda" or "tpu".
        device: The maker's name.
        memory_bytes: Bytes that a program may use on one device.
        source: Source of memory_bytes.
        topologies: The compiler's names of device groups, with the number of devices in each.
        options: Further arguments of `get_topology_desc`; TPU only.
        gpu: Fields of XLA's GpuDeviceInfoProto; GPU only.
    """

    name: str
    platform: str
    device: str
    memory_bytes: int
    source: str
    topologies: dict[str, int]
    options: dict[str, str]
    gpu: dict[str, Any]

    @property
    def most_devices(self) -> int:
        """The largest group of devices that can be compiled for."""
        return max(self.topologies.values())

    def topology(self, devices: int) -> str:
        """The smallest group with that many devices. Raises TargetError if there is none."""
        for topology, size in sorted(self.topologies.items(), key=lambda item: item[1]):
            if size >= devices:
                return topology
        raise TargetError(f"{self.name}: at most {self.most_devices} devices, got {devices}")

    @property
    def gpu_config(self) -> str:
        """XLA's GpuTargetConfigProto as text. The cuDNN version only has to be
        acceptable to XLA; no program here uses cuDNN."""
        # Without a device XLA plans with 80% of this, on a device with jax's share of the memory.
        # If it believes that arguments take more, it computes things twice.
        size = self.memory_bytes * 5 // 4
        return (
            f"gpu_device_info {{ {_proto({**self.gpu, 'device_memory_size': size})} }} "
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            f'device_description_str: "{self.device}"'
        )


def target_names() -> list[str]:
    """The names that `load_target` knows: GPUs first, each kind by age."""
    return sorted((path.stem for path in _FOLDER.glob("*.json")), key=_order)


def load_target(name: str) -> Target:
    """Reads a target's file; TargetError lists the known names."""
    if name not in target_names():
        raise TargetError(f"--target: {name!r} is not one of {', '.join(target_names())}")
    fields = json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Target(name=name, **{"options": {}, "gpu": {}, **fields})


def _order(name: str) -> tuple[bool, str]:
    return name.startswith("v"), name


def _proto(fields: dict[str, Any]) -> str:
    parts = (
        f"{key} {{ {_proto(value)} }}" if isinstance(value, dict) else f"{key}: {value}"
        for key, value in fields.items()
    )
    return " ".join(parts)
