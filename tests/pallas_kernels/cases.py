"""What every backend is held to: the static part, one compilation each, and who takes it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.pallas_kernels import HIDDEN, KV, KernelShape, get_backend, unsupported
from jaxserve.pallas_kernels.pool import FLOAT8, cached_width
from tests.pallas_kernels.batches import Shape

# Cases that add the least to the others, where compiling for an interpreter takes long; and where
# numba does, which has the same kernel for any shape of one head_dim and pool.
SLOW = ("decodes", "mixed", "float8", "latent-mixed", "latent-float8")
SLOW_BY_NUMBA = ("float8", "latent-mixed", "latent-float8")
# Those of other devices are interpreted. How many drawn batches a test has: GPUs are interpreted
# slowly, TPUs an instruction at a time.
BACKENDS = {"xla": 3, "numba": 3, "triton-interpret": 2, "tpu-interpret": 1}
# Relative error (L2) that is allowed.
LIMITS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape with the options of attention over it. parts: of the hidden vectors' projection, as
    `batches.make_projection` names them. A test of hidden vectors has kv_heads queries a token.
    cache: dtype of the pool, where it is not that of the queries. halves: see `Scoring`."""

    name: str
    shape: Shape
    dtype: str = "float32"
    cache: str = ""
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    halves: int = 0
    parts: tuple[str, ...] = ()

    @property
    def cached(self) -> str:
        """The dtype of the pool."""
        return self.cache or self.dtype

    @property
    def limit(self) -> float:
        """The relative error (L2) that is allowed."""
        return LIMITS[self.dtype]

    @property
    def scale(self) -> float:
        """Of scores, such that softmax is neither flat nor a maximum."""
        return float(1.5 * self.shape.head_dim**-0.5)


# Three tiles of XLA's context, and five or more of the others'.
DECODES = Shape(4, 2, head_dim=64, block_size=32, width=5, tokens=5)
CASES = (
    Case("decodes", DECODES, parts=("rotary",)),
    # Blocks wider than a tile of context; a group of query heads that is no power of two.
    Case(
        "cut-decodes",
        Shape(6, 2, head_dim=64, block_size=128, rows=3, width=2, tokens=3),
        window=11,
        cap=3.0,
        sinks=True,
        parts=("bias", "norm", "rotary"),
    ),
    # Tiles of 32 queries without grouped heads, so that TPUs send more than one unit of 16; XLA's
    # are wider, see test_xla.
    Case("mixed", dataclasses.replace(DECODES, num_heads=2, tokens=40), parts=("bias",)),
    Case(
        "cut-mixed",
        Shape(6, 2, head_dim=128, block_size=8, rows=4, width=9, tokens=40),
        "bfloat16",
        window=20,
        cap=1.5,
        sinks=True,
        parts=("norm", "rotary"),
    ),
    # What TPUs do not take: a small head_dim, sizes that are no powers of two, float16.
    Case(
        "odd",
        Shape(15, 3, head_dim=40, block_size=24, rows=3, width=4, tokens=3),
        "float16",
        sinks=True,
        parts=("norm", "rotary"),
    ),
    # Pools of 8 bits, with queries of 32 and 16.
    Case(
        "int8",
        dataclasses.replace(DECODES, tokens=40),
        cache="int8",
        window=90,
        parts=("bias", "rotary"),
    ),
    Case(
        "float8",
        Shape(6, 2, head_dim=128, block_size=32, rows=3, width=3, tokens=3),
        "bfloat16",
        cache=FLOAT8,
        cap=3.0,
        parts=("bias", "norm", "rotary"),
    ),
    # Latent vectors, of a width that is a power of two or not, with chunks of one token and of
    # many.
    Case("latent-decodes", Shape(10, 1, 26, block_size=32, width=5), sinks=True, halves=19),
    Case(
        "latent-mixed",
        Shape(6, 1, head_dim=64, block_size=8, rows=4, width=9, tokens=40),
        "bfloat16",
        window=20,
        cap=1.5,
        halves=48,
    ),
    # What is not rotated in 8 bits.
    Case(
        "latent-int8",
        Shape(6, 1, head_dim=60, block_size=32, width=3, tokens=40),
        cache="int8",
        window=50,
        halves=40,
    ),
    Case(
        "latent-float8",
        Shape(10, 1, head_dim=60, block_size=32, width=2),
        "bfloat16",
        cache=FLOAT8,
        halves=40,
    ),
)
LATENT = ("latent-decodes", "latent-mixed", "latent-int8", "latent-float8")
NARROW = ("int8", "float8")
BY_NAME = {case.name: case for case in CASES}


@functools.cache
def compiled(
    function: Callable[..., jax.Array], backend: str, *, donate: bool = False
) -> Callable[..., jax.Array]:
    """A kernel's public function by a backend, under jit; donate: its first argument."""
    return jax.jit(
        functools.partial(function, backend=backend), donate_argnums=(0,) if donate else ()
    )


def takes(backend: str, case: Case, kind: int) -> bool:
    """Whether a backend says that it has kernels of this kind for the case's shape."""
    shape, dtype = case.shape, case.cached
    num_heads = shape.kv_heads if kind == HIDDEN else shape.num_heads
    width = cached_width(shape.head_dim, dtype, case.halves)
    seen = KernelShape(
        num_heads, shape.kv_heads, width, shape.block_size, dtype, halves=case.halves
    )
    return unsupported(get_backend(backend), kind, seen) is None


def backends_with(purpose: str) -> list[str]:
    """Those that have a function of their own for a purpose, a field of `Backend`. What one has of
    another's, as numba of XLA's all but attention over K and V, is tested as the other's."""
    first: dict[Any, str] = {}
    for backend in BACKENDS:
        first.setdefault(getattr(get_backend(backend), purpose), backend)
    return list(first.values())


def _marks(backend: str, case: Case) -> list[pytest.MarkDecorator]:
    slow = SLOW if backend.endswith("interpret") else SLOW_BY_NUMBA if backend == "numba" else ()
    return [pytest.mark.slow] if case.name in slow else []


def on_backends(names: Sequence[str], purpose: str, kind: int = KV) -> list[ParameterSet]:
    """Parameters (backend, case): every backend of `backends_with` with each of these cases that
    it takes."""
    return [
        pytest.param(backend, case, id=f"{backend}-{case.name}", marks=_marks(backend, case))
        for backend in backends_with(purpose)
        for case in (BY_NAME[name] for name in names)
        if takes(backend, case, kind)
    ]
