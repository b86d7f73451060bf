"""Reaching the compilers of devices that this machine does not have.

TPU: libtpu makes a topology and compiles for it. CUDA: the plugin in jax's wheels compiles, too,
but does not start without cuDNN, so its library is registered here directly.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxserve.models.sharding import TENSOR
from jaxserve_lab.compile_check.bundles import FLAGS
from jaxserve_lab.compile_check.targets import Target

# Otherwise libtpu asks the cloud's metadata server for its TPU.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    # No process needs exclusive use of a device, so several checks may run.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CUDA_PLUGIN = "jax_plugins.xla_cuda13"


def quiet_start(*, loops: bool = False) -> None:
    """Sets jax up for compiling only: call it before jax makes its first client.

    Everything else runs on the CPU, and no cache is used, so that the seconds are real. loops: make
    libtpu dump the kernels' code. Whole steps then take twice as long, and this cannot be set
    later.
    """
    os.environ.update(_TPU_ENVIRONMENT)
    if loops:
        flags = f"{FLAGS} --xla_jf_dump_to={tpu_dump()}"
        os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    # The CUDA plugin's own start fails without a GPU, and jax logs the traceback.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)


@functools.cache
def tpu_dump() -> Path:
    """The folder to which libtpu dumps kernels, in all compilations of this process, which removes
    it at its end."""
    folder = tempfile.TemporaryDirectory(prefix="jaxserve-tpu-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def why_not(target: Target) -> str | None:
    """Why this target cannot be compiled for here; None if it can."""
    return _COMPILERS[target.platform][0]()


def mesh(target: Target, devices: int) -> Mesh:
    """A mesh of the first `devices` of a group, with the one axis "tensor"."""
    if _no_cuda() is None:
        _register_cuda()  # the first topology of any platform starts jax's plugins
    name = target.topology(devices)
    description = _COMPILERS[target.platform][1](target, name)
    return Mesh(np.asarray(description.devices[:devices]), (TENSOR,))


def ptxas() -> Path | None:
    """NVIDIA's assembler, from the wheels or on the PATH."""
    wheel = importlib.util.find_spec("nvidia")
    folders = (
        [Path(root) / "cu13" / "bin" for root in wheel.submodule_search_locations or ()]
        if (wheel)
        else []
    )
    folders += [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    return next((f / "ptxas" for f in folders if (f / "ptxas").is_file()), None)


def _no_libtpu() -> str | None:
    return None if importlib.util.find_spec("libtpu") else "libtpu is not installed"


def _no_cuda() -> str | None:
    if _cuda_library() is None:
        return "jax-cuda13-pjrt is not installed"
    return None if ptxas() else "ptxas (nvidia-cuda-nvcc) is not installed"


def _cuda_library() -> Path | None:
    try:
        spec = importlib.util.find_spec(CUDA_PLUGIN)
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "xla_cuda_plugin.so"
    return library if library.is_file() else None


@functools.cache
def _register_cuda() -> None:
    assembler = ptxas()
    assert assembler is not None
    os.environ["PATH"] = f"{assembler.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Before jax looks for plugins; otherwise it would register this one again and fail.
    plugin: Any = importlib.import_module(CUDA_PLUGIN)
    plugin.initialize = lambda: None
    xla_bridge.register_plugin("cuda", priority=-1, library_path=str(_cuda_library()))


def _cuda_topology(target: Target, name: str) -> Any:
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name=target.name,
        topology=name,
        target_config=target.gpu_config,
    )


def _tpu_topology(target: Target, name: str) -> Any:
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **target.options)


_COMPILERS: dict[str, tuple[Callable[[], str | None], Callable[[Target, str], Any]]] = {
    "cuda": (_no_cuda, _cuda_topology),
    "tpu": (_no_libtpu, _tpu_topology),
}
