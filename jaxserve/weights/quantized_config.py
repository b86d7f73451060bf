"""How a checkpoint's weights are quantised, by its config.json and its tensors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxserve import checkpoint_files
from jaxserve.models.base import Family, Leaf, ModelConfig
from jaxserve.models.hf import shown
from jaxserve.models.quantized import DTYPES, Quantization, Scheme
from jaxserve.weights.errors import CheckpointError, read_json
from jaxserve.weights.mxfp4 import METHOD
from jaxserve.weights.packed import Format
from jaxserve.weights.tensors import TensorFiles

log = logging.getLogger(__name__)

OWN = "jaxserve"  # the quant_method that `save_orbax` writes
_FIELDS = ("quantization_config", "compression_config")
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_KNOWN = "gptq, awq, compressed-tensors, fp8, mxfp4"


def stored_format(hf: Mapping[str, Any], folder: Path) -> Format | Quantization | None:
    """How a checkpoint's weights are quantised, by config.json or a file beside it: a
    `Quantization` if `jaxserve convert` has written the checkpoint, None if they are not quantised,
    or are dequantised when they are read (`reads_mxfp4`).

    Raises:
        ValueError: If the format is not supported; the message names the field.
    """
    where, config = "", None
    for field in _FIELDS:
        if hf.get(field) is not None:
            where, config = f"config.json: {field}", hf[field]
            break
    else:
        if (folder / "hf_quant_config.json").exists():
            raise ValueError(
                "hf_quant_config.json: quantized weights of ModelOpt are not supported"
            )
        for name, method in _FILES.items():
            if (folder / name).exists():
                try:
                    where, config = name, checkpoint_files.read_json(folder / name)
                except (ValueError, OSError) as error:
                    raise ValueError(f"{name}: {error}") from None
                if isinstance(config, dict):
                    config.setdefault("quant_method", method)
                break
        else:
            return None
    if not isinstance(config, dict):
        raise ValueError(f"{where} must be an object, got {shown(config)}")
    try:
        return _format(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def packed_format(folder: Path) -> Format | None:
    """How the tensors in a checkpoint's safetensors are quantised; None if they are not, or there
    is no config.json. Raises CheckpointError as `stored_format` raises ValueError."""
    if not (folder / "config.json").exists():
        return None
    try:
        form = stored_format(read_json(folder / "config.json"), folder)
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if isinstance(form, Quantization):
        raise CheckpointError(f"{folder}: its config.json is of quantised weights in Orbax")
    return form


def reads_mxfp4(folder: Path) -> bool:
    """Whether a checkpoint's config.json says that weights are MXFP4."""
    if not (folder / "config.json").exists():
        return False
    config = read_json(folder / "config.json").get(_FIELDS[0])
    return isinstance(config, dict) and str(config.get("quant_method", "")).lower() == METHOD


def reads_wide(family: Family, config: ModelConfig) -> bool:
    """Whether quantised weights are dequantised when they are read. They are if several parameters
    are parts of one tensor, or one parameter is made of several tensors, as for experts."""
    return (family.joined_tensor(config) or family.stacked_tensor(config)) is not None


def is_quantized(folder: Path) -> bool:
    """Whether an Orbax checkpoint's weights are stored quantised. Raises CheckpointError as
    `stored_format` raises ValueError."""
    try:
        return stored_format(read_json(folder / "config.json"), folder) is not None
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def find_quantization(
    folder: Path, stored: Format, family: Family, config: ModelConfig
) -> Quantization | None:
    """Which of the model's weights are quantised, and how, by the shapes of their tensors. None if
    they are dequantised when they are read, see `reads_wide`.

    Args:
        folder: the checkpoint's folder.
        stored: its format by its config.
        family: the model's.
        config: its shape.

    Raises:
        CheckpointError: If a weight's format is not supported, no weight is quantised, or their
            formats differ.
    """
    if reads_wide(family, config):
        return None
    leaves: list[Leaf] = jax.tree.leaves(family.leaves(config))
    wide: list[str] = []
    by_role: dict[str, tuple[str, Scheme]] = {}  # "table" or "scheme" -> the first weight of it
    sizes: dict[str, int] = {}
    with TensorFiles(folder, family.prefix) as files:
        for leaf in leaves:
            if not (leaf.is_table or leaf.source.transpose):
                continue
            inputs, outputs = leaf.spec.shape[::-1] if leaf.is_table else leaf.spec.shape
            scheme = stored.scheme(files, leaf.name, inputs, outputs)
            sizes[leaf.name] = inputs
            if scheme is None:
                wide.append(leaf.name)
                continue
            role = "table" if leaf.is_table else "scheme"
            name, first = by_role.setdefault(role, (leaf.name, scheme))
            if first.group == 0 and sizes[name] == scheme.group:  # it has one such group
                first = dataclasses.replace(first, group=scheme.group)
                by_role[role] = name, first
            if not scheme.alike(first, inputs):
                raise CheckpointError(
                    f"{leaf.name} is quantised as {_told(scheme)}, {name} as {_told(first)}; all "
                    "must be alike"
                )
    if "scheme" not in by_role:
        raise CheckpointError("its config says that weights are quantized, but no tensor is")
    apart = [name for name in wide if name.endswith(("q_proj", "k_proj", "v_proj"))]
    if apart:
        layer = apart[0].rpartition(".")[0]
        if not all(f"{layer}.{part}_proj" in wide for part in "qkv"):
            raise CheckpointError(f"{apart[0]} is not quantised, others of q, k and v are")
    if stored.activations:
        log.info("%s: only its weights are taken as quantised; activations stay wide", folder)
    schemes: dict[str, Any] = {role: scheme for role, (_, scheme) in by_role.items()}
    return Quantization(wide=tuple(wide), **schemes)


def as_json(quantization: Quantization) -> dict[str, Any]:
    """The quantization for config.json, as `stored_format` reads it."""
    own = dataclasses.replace(quantization, dequantizable=False)
    return {"quant_method": OWN, **dataclasses.asdict(own)}


def _told(scheme: Scheme) -> str:
    by = f"by groups of {scheme.group}" if scheme.group else "by output"
    return f"{scheme.kind} {by}{' with zero points' if scheme.zero else ''}"


def _format(config: Mapping[str, Any]) -> Format | Quantization | None:
    method = str(config.get("quant_method", "")).lower()
    if method == METHOD:
        return None
    if method == OWN:
        return _own(config)
    if method == "gptq":
        return _gptq(config)
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"awq version {shown(version)} is not supported (known: gemm)")
        return Format("awq", symmetric=not config.get("zero_point", True))
    if method == "fp8":
        if config.get("fmt", "e4m3") != "e4m3":
            raise ValueError(f"fmt {shown(config['fmt'])} is not supported (known: e4m3)")
        block = _block(config.get("weight_block_size"))
        return Format("float", block=block, activations=True)
    if method == "compressed-tensors" or (not method and "config_groups" in config):
        return _compressed(config)
    named = shown(method or dict(config)).strip("'")
    raise ValueError(f"{named} is not supported (known: {_KNOWN})")


def _gptq(config: Mapping[str, Any]) -> Format:
    layout = config.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"checkpoint_format {shown(layout)} is not supported (known: gptq, gptq_v2)"
        )
    symmetric = config.get("sym", True) is not False
    return Format("gptq", symmetric, offset=0 if layout == "gptq_v2" else 1)


def _compressed(config: Mapping[str, Any]) -> Format:
    sparse = config.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config {shown(sparse.get('format'))} is not supported")
    if config.get("transform_config"):
        raise ValueError("transform_config is not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("config_groups is missing")
    formats = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ValueError(f"config_groups: {shown(name)} says nothing of weights")
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ValueError(f"weights of {shown(bits)} bits ({shown(kind)}) are not supported")
        block = None
        if weights.get("strategy") == "block":
            block = _block(weights.get("block_structure"))
        symmetric = weights.get("symmetric", True) is not False
        activations = group.get("input_activations") is not None
        formats.add(Format("float", symmetric, block=block, activations=activations))
    if len(formats) > 1:
        raise ValueError("config_groups whose weights are quantised differently are not supported")
    return formats.pop()


def _block(shape: Any) -> tuple[int, int] | None:
    if shape is None:
        return None
    sizes = isinstance(shape, list) and len(shape) == 2
    if not sizes or not all(type(size) is int and 0 < size <= 4096 for size in shape):
        raise ValueError(f"blocks of {shown(shape)} are not supported")
    return shape[0], shape[1]


def _own(config: Mapping[str, Any]) -> Quantization:
    try:
        schemes: dict[str, Any] = {role: Scheme(**config[role]) for role in ("scheme", "table")}
        wide = tuple(map(str, config["wide"]))
        others = tuple(
            (str(name), Scheme(**scheme_fields)) for name, scheme_fields in config.get("others", ())
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is not as jaxserve convert writes it: {error}") from None
    for scheme in (*schemes.values(), *(scheme_fields for _, scheme_fields in others)):
        if (
            type(scheme.kind) is not str
            or scheme.kind not in DTYPES
            or type(scheme.group) is not int
            or scheme.group < 0
        ):
            raise ValueError(f"{shown(dataclasses.asdict(scheme))} is not known")
        if scheme.scale not in ("float32", "float16", "bfloat16"):
            raise ValueError(f"scales of {shown(scheme.scale)} are not supported")
    return Quantization(wide=wide, others=others, **schemes)
