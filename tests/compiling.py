"""How steps and kernels are compiled in tests; imported before jax, which reads the environment.

Most of what the suite takes is compiling, and most of that work on loops that run for milliseconds:
LLVM is told not to optimise, and jaxlib 0.10, the newest for Python 3.11, writes loops as LLVM's
code at once, not by way of MLIR, which takes twice as long. Later ones know no other way. A step's
functions go through LLVM together: to part them among up to 32 threads takes up to a tenth longer.
XLA's own passes, and the libraries that multiply, are as ever. One cache of what is compiled serves
all tests and workers, kept from run to run beside the packages that it belongs to.

NumPy's products, all of which are small, have one thread: others wait busily for their share, which
takes as long again, and longer where other workers are busy.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

CACHES = Path(__file__).parents[1] / ".venv" / "test-caches"
# XLA's own defaults, for what says how a model or a kernel computes: it is compiled as users have
# it all the same. So is all that `make soak` serves, and all of a process of `as_users_have_it`.
OPTIMISED: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
AS_USERS_HAVE_IT = "JAXSERVE_TESTS_OPTIMISED"

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHES / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
_flags = []
if AS_USERS_HAVE_IT not in os.environ:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    _flags.append("--xla_cpu_parallel_codegen_split_count=1")
if importlib.metadata.version("jaxlib").startswith("0.10."):
    OPTIMISED["xla_cpu_use_fusion_emitters"] = True
    if AS_USERS_HAVE_IT not in os.environ:
        _flags.append("--xla_cpu_use_fusion_emitters=false")
_given = os.environ.get("XLA_FLAGS", "").split()  # those of a parent process that are ours, too
os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*_given, *_flags]))


def virtual_devices(count: int) -> str:
    """XLA_FLAGS for a process that has so many."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".strip()


def as_users_have_it() -> dict[str, str]:
    """The environment of a process of tests that compiles everything so."""
    ours = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    return {**plain, AS_USERS_HAVE_IT: "1"}
