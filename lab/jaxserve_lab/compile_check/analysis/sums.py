"""Which numbers a compiled step adds up, and whether the order can depend on other rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxserve_lab.compile_check.analysis import hlo

# Our kernels in which the order of a row's sums depends only on the row, for given shapes. Others
# split contexts by the rest of the batch, or run for some rows only.
# paged_prefill on TPUs; on GPUs merge_parts follows it.
ATTENTION = {"paged_uncut", "latent_uncut", "paged_prefill"}
PRODUCTS = {"by_group", "grouped_matmul"}
GROUPED = {"ragged-dot-none", "ragged-dot-metadata"}  # XLA's for TPUs, with tiles of one size
COPIES = {"pool_write", "paged_put", "put_scales"}
ONE_ORDER = frozenset(ATTENTION | PRODUCTS | GROUPED | COPIES)
_FLOAT = re.compile(r"b?f\d")
_DIMS = re.compile(r"[ ,]dimensions=\{([\d,]*)\}")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LABELS = re.compile(r"dim_labels=(\w+)_")
_PALLAS = re.compile(r'op_name="[^"]*?(\w+)/pallas_call"')
_ATOMIC = re.compile(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S*\.b?f(?:16|32|64)\S*)", re.MULTILINE)


def sums_of(module: hlo.Module) -> dict[str, int]:
    """Counts sums of floats by kind, such as "f32 reduce 4096" or "bf16 dot 768", and our kernels,
    as "kernel NAME"."""
    counts: Counter[str] = Counter()
    for operations in module.computations.values():
        shapes = {op.name: op.arrays for op in operations}
        for op in operations:
            counts.update(_of(op, shapes, module))
    return dict(sorted(counts.items()))


def _of(
    op: hlo.Operation, shapes: Mapping[str, tuple[hlo.Array, ...]], module: hlo.Module
) -> Iterator[str]:
    if op.opcode == "custom-call" and (kernel := _kernel(op)):
        yield f"kernel {kernel}"
        return
    given = shapes.get(op.operands[0], ()) if op.operands else ()
    if not given or not _FLOAT.match(given[0].dtype):
        return
    (dtype, dims), inside = (given[0].dtype, given[0].dims), None
    if op.opcode in ("reduce", "reduce-window", "scatter"):
        if any(one.opcode == "add" for name in op.called for one in module.computations[name]):
            inside = _DIMS.search(op.rest) if op.opcode == "reduce" else None
            yield f"{dtype} {op.opcode} {_sizes(dims, inside[1] if inside else '')}".rstrip()
    elif op.opcode == "convolution" and (labels := _LABELS.search(op.rest)):
        yield f"{dtype} dot {dims[labels[1].index('f')]}"
    elif contracted := _CONTRACTED.search(op.rest):
        yield f"{dtype} dot {_sizes(dims, contracted[1])}"


def _sizes(dims: tuple[int, ...], axes: str) -> str:
    return "x".join(str(dims[int(axis)]) for axis in axes.replace('"', "").split(",") if axis)


def _kernel(op: hlo.Operation) -> str | None:
    if '"tpu_custom_call"' in op.rest:
        return re.sub(r"\.\d+$", "", op.name.removeprefix("%").removesuffix(".clone"))
    match = _PALLAS.search(op.rest)
    return match[1] if match else None


def float_atomics(folder: Path) -> list[str]:
    """Atomic additions of floats in a dump's kernels, whose order depends on timing."""
    return [
        instruction
        for path in sorted(folder.glob("*.ptx"))
        for instruction in _ATOMIC.findall(path.read_text(encoding="utf-8"))
    ]


def unordered(sums: Iterable[str], atomics: Iterable[str]) -> Iterator[str]:
    """Why the order of a deterministic step's sums may vary, one line each. sums: from `sums_of`.
    atomics: from `float_atomics`."""
    for kind in sums:
        if kind.startswith("kernel ") and kind.removeprefix("kernel ") not in ONE_ORDER:
            yield f"{kind} adds up in an order that depends on other rows"
        if " scatter" in kind:
            yield f"a scatter adds up {kind.split()[0]} in any order"
    for kind in sorted(set(atomics)):
        yield f"{kind} adds up in an order that depends on timing"
