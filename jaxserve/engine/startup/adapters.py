"""The adapters that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxserve.config import ConfigError
from jaxserve.engine.adapters import AdapterSlots
from jaxserve.engine.errors import AdapterError
from jaxserve.engine.startup.choices.kernel_choice import Kernels
from jaxserve.weights.lora import LoadedAdapter, load_adapter


def check_adapters(adapters: Mapping[str, str], kernels: Kernels, base: str) -> None:
    """Loads them to nowhere, before minutes are spent on compiling. adapters: paths by name. base:
    name of the model. Raises ConfigError."""
    slots = adapter_slots(kernels, base)
    if slots is not None:
        load_adapters(adapters, lambda name, path: slots.load(name, path, None, lambda *_: None))


def load_adapters(adapters: Mapping[str, str], load: Callable[[str, str], object]) -> None:
    """Calls `load` with each one's name and path. Raises ConfigError."""
    for name, path in adapters.items():
        try:
            load(name, path)
        except AdapterError as error:
            raise ConfigError(f"lora.adapters: {name}: {error}") from None


def adapter_slots(kernels: Kernels, base: str) -> AdapterSlots | None:
    """Room for adapters to the base model of this name; None for none."""
    model = kernels.model
    slots = model.lora
    if slots is None:
        return None

    def load(folder: Path, root: Path | None) -> LoadedAdapter:
        return load_adapter(
            folder,
            model.family,
            model.config,
            slots,
            fused=model.fused,
            dtype=kernels.dtype,
            root=root,
        )

    return AdapterSlots(slots.count, slots.rank, load, base)
