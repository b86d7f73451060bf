"""Adapters (LoRA) in PEFT's format: adapter_config.json and adapter_model.safetensors. They may be
untrusted and come while requests are served. So a file's size is bounded, and it is read whole and
checked against the model before it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, deserialize

from jaxserve.checkpoint_files import read_bytes, read_json
from jaxserve.models.base import Family, ModelConfig
from jaxserve.models.hf import shown
from jaxserve.models.lora import Layers, Lora, LoraSlots, Projection, bucket, projections
from jaxserve.weights.errors import CheckpointError

T = TypeVar("T")

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG = 1 << 20  # bytes
_HEADER = 16 << 20  # most bytes of the tensors' names and metadata
_PREFIX = "base_model.model."
_HALVES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
# Fields that change an adapter's meaning in ways that are not supported, unless they are off.
_UNSERVED = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "corda_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
_CHANGING_INIT = ("pissa", "olora", "corda", "loftq", "lora_ga")  # they also change the base model


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter, ready for the device.

    Attributes:
        arrays: NumPy arrays for `jaxserve.models.lora.make_put`, with `columns` columns.
        rank: its rank.
        columns: columns that it takes, the bucket of its rank.
        digest: hash of everything that affects outputs: equal digests give equal text.
    """

    arrays: Layers
    rank: int
    columns: int
    digest: bytes


def load_adapter(
    folder: Path,
    family: Family,
    config: ModelConfig,
    slots: LoraSlots,
    *,
    fused: bool,
    dtype: DTypeLike,
    root: Path | None = None,
) -> LoadedAdapter:
    """Reads and checks an adapter. Any thread may call this.

    Args:
        folder: a folder saved by PEFT.
        family: the model's.
        config: its shape.
        slots: the room for adapters.
        fused: whether q, k and v are fused, see `jaxserve.models.fused`.
        dtype: dtype in which the adapter is kept.
        root: folder that must contain it and its files, with links resolved; None for any.

    Raises:
        CheckpointError: If a file is missing, outside of the root or damaged, or the adapter is for
            another model, too large, or of an unsupported kind.
    """
    every = list(projections(family, config, fused=fused))
    modules: dict[str, list[Projection]] = {}
    for projection in every:
        modules.setdefault(projection.leaf.name, []).append(projection)
    values = sum(sum(projection.leaf.spec.shape) for projection in every) * slots.rank
    fields = _read(folder, CONFIG, root, lambda path: read_json(path, MAX_CONFIG))
    if not isinstance(fields, dict):
        raise CheckpointError(f"{CONFIG} does not hold a JSON object")
    settings = _Settings(fields, slots)
    most = 8 * values + _HEADER
    tensors = _tensors(_read(folder, TENSORS, root, lambda path: read_bytes(path, most)))
    halves = _halves(tensors, modules, family.prefix, slots)
    settings.check_whole(halves, modules)
    return _packed(halves, modules, settings, slots, np.dtype(jnp.dtype(dtype)))


def _read(folder: Path, name: str, root: Path | None, read: Callable[[Path], T]) -> T:
    """The content of a file in the folder. Raises CheckpointError if it cannot be read, or is not
    under the root with links resolved."""
    try:
        path = Path(os.path.realpath(folder.expanduser() / name, strict=True))
        if root is not None:
            inside = os.path.realpath(root.expanduser(), strict=True)
            if not path.is_relative_to(inside):
                raise ValueError("it is not under lora.root")
        return read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{str(folder)!r:.200} has no {name}") from None
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name} in {str(folder)!r:.200}: {problem}") from None


class _Settings:
    """The settings in adapter_config.json. CheckpointError names an unsupported field."""

    def __init__(self, fields: Mapping[str, Any], slots: LoraSlots) -> None:
        self._fields = fields
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise _of_field("peft_type", f"must be LORA, got {shown(kind)}")
        for name in _UNSERVED:
            if fields.get(name):
                raise _of_field(name, f"{shown(fields[name])} is not supported")
        if fields.get("bias") not in (None, "none"):
            raise _of_field("bias", f"{shown(fields['bias'])} is not supported, only none")
        init = fields.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_CHANGING_INIT):
            raise _of_field(
                "init_lora_weights", f"{shown(init)} changes the base's weights; convert it first"
            )
        rank = fields.get("r")
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise _of_field("r", f"must be a positive integer, got {shown(rank)}")
        if rank > slots.rank:
            raise _of_field("r", f"{shown(rank)} is more than lora.max_rank ({slots.rank})")
        alpha: Any = fields.get("lora_alpha")
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not (number and 1e-30 < alpha < 1e30):
            raise _of_field("lora_alpha", f"must be a number above 0, got {shown(alpha)}")
        stabilised = fields.get("use_rslora", False)
        if not isinstance(stabilised, bool | None):
            raise _of_field("use_rslora", f"must be true or false, got {shown(stabilised)}")
        self.rank = rank
        self.scale = alpha / (math.sqrt(rank) if stabilised else rank)

    def check_whole(
        self,
        halves: Mapping[str, Mapping[str, np.ndarray]],
        modules: Mapping[str, Sequence[Projection]],
    ) -> None:
        """Raises CheckpointError unless both halves of each projection have the right shape, and
        all projections that the config names are there."""
        for module, both in halves.items():
            for half, name in (("A", "lora_A"), ("B", "lora_B")):
                if half not in both:
                    raise CheckpointError(f"there is no tensor '{_PREFIX}{module}.{name}.weight'")
            self._check_shapes(module, both, modules[module])
        wanted, excluded = (self._fields.get(f"{kind}_modules") for kind in ("target", "exclude"))
        without = _of_names(excluded, "exclude_modules", modules)
        if present := sorted(without & halves.keys()):
            raise _of_field(
                "exclude_modules", f"names {shown(present[0])}, of which there are tensors"
            )
        if not isinstance(wanted, list) or self._fields.get("layers_to_transform") is not None:
            return
        if isinstance(excluded, str):  # a pattern, as target_modules may be one
            return
        for target in wanted:
            mine = _of_names([target], "target_modules", modules)
            if not mine:
                raise _of_field(
                    "target_modules", f"{shown(target)} is not a projection of this model"
                )
            for module in sorted(mine - without):
                if module not in halves:
                    name = f"{_PREFIX}{module}.lora_A.weight"
                    raise CheckpointError(f"there is no tensor {name!r}, by its target_modules")

    def _check_shapes(
        self, module: str, both: Mapping[str, np.ndarray], parts: Sequence[Projection]
    ) -> None:
        leaf = parts[0].leaf
        out, inputs = leaf.source.stored_shape(leaf.spec.shape)
        for half, shape in (("A", (self.rank, inputs)), ("B", (out, self.rank))):
            if both[half].shape != shape:
                raise CheckpointError(
                    f"tensor '{_PREFIX}{module}.lora_{half}.weight': expected shape "
                    f"{list(shape)}, found {list(both[half].shape)}"
                )


def _of_names(names: Any, field: str, modules: Iterable[str]) -> set[str]:
    """The modules that a list of names means; empty if it is not a list."""
    matches: set[str] = set()
    for name in names if isinstance(names, list) else ():
        if not isinstance(name, str):
            raise _of_field(field, f"must hold names, got {shown(name)}")
        matches.update(m for m in modules if m == name or m.endswith(f".{name}"))
    return matches


def _tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file, by name."""
    try:
        entries = deserialize(data)
    except SafetensorError as error:
        raise CheckpointError(f"cannot read {TENSORS}: {error}") from None
    tensors = {}
    for name, about in entries:
        dtype = _DTYPES.get(about["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"tensor {name!r:.200}: stored as {about['dtype']}, which is not supported "
                f"(known: {', '.join(_DTYPES)})"
            )
        tensors[name] = np.frombuffer(about["data"], dtype).reshape(about["shape"])
    if not tensors:
        raise CheckpointError(f"{TENSORS} has no tensors")
    return tensors


def _halves(
    tensors: Mapping[str, np.ndarray],
    modules: Mapping[str, Sequence[Projection]],
    prefix: str,
    slots: LoraSlots,
) -> dict[str, dict[str, np.ndarray]]:
    """A and B of each projection, by its name in the model."""
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        suffix = next((half for half in _HALVES if name.endswith(half)), "")
        module = name.removesuffix(suffix).removeprefix(_PREFIX)
        module = module if module in modules else prefix + module
        if not suffix or module not in modules:
            known = ", ".join(dict.fromkeys(entry[0].target for entry in modules.values()))
            raise CheckpointError(
                f"tensor {name!r:.200} is not of a projection that adapters may change ({known})"
            )
        if slots.targets and modules[module][0].target not in slots.targets:
            raise CheckpointError(
                f"tensor {name!r:.200} is not of lora.target_modules ({', '.join(slots.targets)})"
            )
        both = halves.setdefault(module, {})
        if _HALVES[suffix] in both:
            raise CheckpointError(
                f"tensor {name!r:.200} is there twice, with and without its prefix"
            )
        both[_HALVES[suffix]] = tensor
    return halves


def _packed(
    halves: Mapping[str, Mapping[str, np.ndarray]],
    modules: Mapping[str, Sequence[Projection]],
    settings: _Settings,
    slots: LoraSlots,
    dtype: np.dtype,
) -> LoadedAdapter:
    """The adapter's arrays in the form of its columns. Raises CheckpointError if a value is not
    finite in that dtype."""
    layers: list[dict[str, tuple[list[np.ndarray], list[np.ndarray]]]] = []
    digest, rank = blake2b(digest_size=16), settings.rank
    columns = bucket(rank)
    for module, parts in modules.items():
        both = halves.get(module)
        for part in parts:
            spec, source = part.leaf.spec, part.leaf.source
            inputs, out = spec.shape
            a, b = np.zeros((columns, inputs), dtype), np.zeros((columns, out), dtype)
            if both is not None:
                first = 0 if source.rows is None else source.rows[0]
                own = both["B"][first : first + out].astype(np.float32)
                with np.errstate(over="ignore", invalid="ignore"):
                    a[:rank] = both["A"].astype(dtype)
                    b[:rank] = (own.T * np.float32(settings.scale)).astype(dtype)
                for half, values in (("A", a), ("B", b)):
                    if not np.isfinite(values.astype(np.float32)).all():
                        raise CheckpointError(
                            f"tensor '{_PREFIX}{module}.lora_{half}.weight' is NaN or infinite in "
                            f"{dtype.name}"
                        )
                digest.update(f"{part.layer} {part.leaf.name} {first}\n".encode())
                digest.update(a.tobytes())
                digest.update(b.tobytes())
            while len(layers) <= part.layer:
                layers.append({})
            mine = layers[part.layer].setdefault(part.place, ([], []))
            mine[0].append(a)
            mine[1].append(b)
    arrays = tuple(
        {
            place: Lora(np.stack(a, axis=1), tuple(b))
            for place, (a, b) in layer.items()
            if _has_room(place, modules, slots)
        }
        for layer in layers
    )
    return LoadedAdapter(arrays, rank, columns, digest.digest())


def _has_room(place: str, modules: Mapping[str, Sequence[Projection]], slots: LoraSlots) -> bool:
    """Whether the slots have room for that projection, see `jaxserve.models.lora.adapter_specs`."""
    if not slots.targets:
        return True
    return any(
        part.place == place and part.target in slots.targets
        for parts in modules.values()
        for part in parts
    )


def _of_field(name: str, problem: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG}: {name} {problem}")
