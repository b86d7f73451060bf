"""What the bits of an answer depend on beside the request, as one short text."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

import jaxserve
from jaxserve.engine.device.buckets import Buckets
from jaxserve.machine import machine
from jaxserve.pallas_kernels.backends import platform_backend

if TYPE_CHECKING:
    from jaxserve.models.base import Params

_COMPILERS = ("jax", "jaxlib", "ml_dtypes", "numba", "llvmlite")
_SOURCES = ("pallas_kernels", "models", "weights", "engine/device")  # what steps are traced from
# Fields of a blueprint that say how many rows, blocks and programs there are.
_SIZES = {"buckets", "allocated_blocks", "moves_cache", "masked_sampling", "grouped"}
_DIGITS = 16


class Built(Protocol):
    """What is read of a `Blueprint`."""

    @property
    def buckets(self) -> Buckets:
        """The shapes of its steps."""

    def plain(self) -> dict[str, Any]:
        """All fields."""


def system_fingerprint(blueprint: Built, tensor: int, weights: str) -> str:
    """Two engines with the same one compute the same from the same tensors in the same order.

    It is made of the versions of jaxserve and of the compilers, of the source of kernels and
    models, of the processor or device, of the model's shape and weights, of all dtypes, and of how
    many devices share a layer. Policy, pool, batch limits and adapters are no part of it, but for
    what the shape of a deterministic step is made of, where there is one.

    Args:
        blueprint: what the executor was built from.
        tensor: devices that share each layer.
        weights: their `checksum`.

    Returns:
        "fp_" and 16 hexadecimal digits.
    """
    fields = {k: v for k, v in blueprint.plain().items() if k not in _SIZES}
    buckets = blueprint.buckets
    step = dataclasses.asdict(buckets.deterministic_step()) if buckets.deterministic else None
    about = {
        "versions": {"jaxserve": jaxserve.__version__, **_versions()},
        "sources": _sources(),
        "device": _device(),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "tensor": tensor,
        "weights": weights,
        "step": step,
        **fields,
    }
    told = json.dumps(about, sort_keys=True).encode()
    return f"fp_{hashlib.sha256(told).hexdigest()[:_DIGITS]}"


def checksum(params: Params) -> str:
    """Of all bits of the parameters that this host has, with their names, shapes and dtypes."""
    leaves = [
        (f"{jax.tree_util.keystr(path)} {shard.index} {leaf.dtype} {leaf.shape}", shard.data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        for shard in leaf.addressable_shards
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # zlib runs without Python's lock
        sums = list(threads.map(lambda named: _crc(named[1]), leaves))
    told = [(name, found) for (name, _), found in zip(leaves, sums, strict=True)]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _crc(part: jax.Array) -> int:
    # Of an array on a GPU, JAX would keep what has been copied to the host.
    part = part if jax.default_backend() == "cpu" else part.copy()
    return zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)


def _versions() -> dict[str, str]:
    found = {}
    for name in _COMPILERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # numba is not needed everywhere
            found[name] = ""
    return found


def _sources() -> str:
    told, root = hashlib.sha256(), Path(jaxserve.__file__).parent
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            told.update(path.relative_to(root).as_posix().encode())
            told.update(path.read_bytes())
    return told.hexdigest()


def _device() -> dict[str, Any]:
    first, kernels = jax.devices()[0], platform_backend()
    built_for = kernels.built_for or (lambda: machine()["cpu"])
    return {
        "kind": first.device_kind,
        "runtime": first.client.platform_version,
        "processor": built_for() if first.platform == "cpu" else "",
    }
