"""The analysis of a compiled program: kernels, loops, traffic and problems."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxserve.engine.device.buckets import PROJECTED_TOKENS
from jaxserve_lab.compile_check import toolchain
from jaxserve_lab.compile_check.analysis import hlo, sums, weights
from jaxserve_lab.compile_check.analysis.indices import narrow_indices
from jaxserve_lab.compile_check.analysis.launches import outside_buffers
from jaxserve_lab.compile_check.analysis.ptx import KernelUse, kernel_uses
from jaxserve_lab.compile_check.analysis.traffic import Traffic, traffic
from jaxserve_lab.compile_check.bundles import Loops, kernel_loops
from jaxserve_lab.compile_check.case import CompileCase
from jaxserve_lab.compile_check.programs import Program

_MIB = 1 << 20
_LARGE = 64 * _MIB  # only weights and the pool are so large
_SPACE = "S(5)"  # host memory in XLA's layouts
# Target and source of an asynchronous copy, with their layouts.
_START = re.compile(r"(%[\w.-]+) = \((\S+), (\S+), \S+\) copy-start\(")
_DONE = re.compile(r" copy-done\((%[\w.-]+)\)")


@dataclass(frozen=True)
class Findings:
    """Results of analysing a compiled program.

    Attributes:
        kernels: Registers, spills and shared memory of each; GPU only.
        loops: Loops of each Pallas kernel; TPU only.
        traffic: Traffic of a whole step.
        weights_moved: Bytes of weights that a whole step moves, see `weights.moves`.
        sums: Sums of a whole step, see `sums.sums_of`.
        problems: Reasons not to serve it, one line each.
    """

    kernels: list[KernelUse] = field(default_factory=list)
    loops: list[Loops] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    weights_moved: int = 0
    sums: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def find_problems(
    case: CompileCase, program: Program, lowered: jax.stages.Lowered, text: str, folder: Path
) -> Findings:
    """Analyses a compiled program.

    Args:
        case: The model and its devices.
        program: The compiled program.
        lowered: The program before XLA optimised it.
        text: The optimised HLO.
        folder: The compiler's dump.

    Raises:
        RuntimeError: The compiler's output is incomplete, or shows that the program cannot run.
    """
    module = hlo.read(text)
    cuda = case.target.platform == "cuda"
    if program.host:
        _check_host_copies(text)
    moved: list[weights.Move] = []
    problems: list[str] = []
    summed = sums.sums_of(module) if program.whole else {}
    if program.deterministic:
        problems += sums.unordered(summed, sums.float_atomics(folder) if cuda else ())
    if program.whole:
        _check_names(module)
        moved = weights.moves(module, weights.is_parameter_of_model)
        # XLA's kernels that read quantised weights directly would be chosen by measuring.
        widens = cuda and program.deterministic and case.config.quantization is not None
        # XLA for TPUs transposes Wv for the hidden decodes of a mixed step.
        if moved and not widens and not (program.hidden and case.target.platform == "tpu"):
            problems.append(_told(moved, "moved"))
        widened = weights.dequantized(module, weights.is_parameter_of_model)
        if widened and not widens:
            problems.append(_told(widened, "dequantised in memory"))
        problems += _too_large(case, module)
        problems += _problems_of_step(case, program, module, folder)
    if cuda:
        problems += [f"32-bit indices: {where}" for where in narrow_indices(lowered)]
    return Findings(
        kernels=_kernels(case, folder) if cuda else [],
        loops=kernel_loops(folder, _pallas_names(module)),
        traffic=traffic(module, is_pool) if program.whole else Traffic(),
        weights_moved=sum(move.size for move in moved),
        sums=summed,
        problems=problems,
    )


def is_pool(op: hlo.Operation) -> bool:
    """Whether the operation is a parameter with the pool, or one of its arrays."""
    return op.source == "pool" or op.source.startswith("pool.")


def _check_names(module: hlo.Module) -> None:
    """Raises RuntimeError if parameters have unexpected names, so that nothing could be found."""
    parameters = [op for op in module.computations[module.entry] if op.opcode == "parameter"]
    others = [op for op in parameters if not weights.is_parameter_of_model(op)]
    if len(others) == len(parameters):
        raise RuntimeError("none of the step's parameters is called params")
    for op in others:
        if not is_pool(op) and sum(array.size for array in op.arrays) > _LARGE:
            raise RuntimeError(
                f"{op.source} is as large as weights, but neither in params nor the pool"
            )


def _told(moved: list[weights.Move], how: str) -> str:
    size = sum(move.size for move in moved) / _MIB
    first = f"{moved[0].opcode} {moved[0].name}"
    return f"{size:.0f} MiB of weights {how} by {len(moved)} operations, such as {first}"


def _problems_of_step(
    case: CompileCase, program: Program, module: hlo.Module, folder: Path
) -> Iterator[str]:
    if case.target.platform == "tpu":
        return  # XLA for TPUs repeats a few copies by itself, and has no launches
    again = {op.name for ops in module.computations.values() for op in ops if ".remat" in op.name}
    if again:
        yield f"{len(again)} operations computed again to save memory, such as {min(again)}"
    # XLA leaves a few kernels between the collectives of several devices, and loops (which only
    # programs without cache reads have), outside of graphs; likewise cuBLAS's products, which
    # deterministic steps use.
    takes_pool = any(is_pool(op) for op in module.computations[module.entry])
    graphs = case.target.platform == "cuda" and case.shards == 1 and not program.deterministic
    if graphs and takes_pool:
        alone = outside_buffers(folder)
        if alone:
            yield f"{len(alone)} kernels outside of command buffers, such as {alone[0]}"


def _pallas_names(module: hlo.Module) -> set[str]:
    """Names of the kernels that the program calls, without the numbers of calls."""
    return {
        op.name.removeprefix("%").rpartition(".")[0] or op.name.removeprefix("%")
        for operations in module.computations.values()
        for op in operations
        if op.opcode == "custom-call" and '"tpu_custom_call"' in op.rest
    }


def _kernels(case: CompileCase, folder: Path) -> list[KernelUse]:
    assembler = toolchain.ptxas()
    uses = kernel_uses(folder, assembler) if assembler is not None else []
    if not uses:
        raise RuntimeError("the assembler got no kernel")
    limit = case.target.gpu["shared_memory_per_block_optin"]
    for use in uses:
        if use.shared > limit:  # otherwise only a launch would fail
            raise RuntimeError(f"{use.name}: {use.shared} B of shared memory, {limit} at most")
    return uses


def _check_host_copies(text: str) -> None:
    to_host, back = host_copies(text)
    if not (to_host and back):
        raise RuntimeError(f"asynchronous copies: {to_host} to host memory, {back} from there")


def host_copies(text: str) -> tuple[int, int]:
    """Counts the asynchronous copies in a compiled program's text that have both a start and a
    done: (to host memory, from host memory)."""
    done = set(_DONE.findall(text))
    counts = [0, 0]
    for name, target, source in _START.findall(text):
        ends = (_SPACE in target, _SPACE in source)
        if name in done and ends[0] != ends[1]:
            counts[ends[1]] += 1
    return counts[0], counts[1]


def _too_large(case: CompileCase, module: hlo.Module) -> Iterator[str]:
    """Each all-gather whose result is larger than the hidden vectors of the longest request (or of
    the tokens that become K and V at once, in all layers), float32 activations of the largest
    batch, and its logits. Gathering for all requests together is far larger."""
    config, sizes = case.config, case.sizes
    tokens = max(config.max_position * case.dtype.itemsize, sizes.max_batch_tokens * 4)
    projected = PROJECTED_TOKENS * config.num_layers * case.dtype.itemsize
    most = max(config.d_model * max(tokens, projected), sizes.max_rows * config.vocab_size * 4)
    for operations in module.computations.values():
        for op in operations:
            if op.opcode not in ("all-gather", "all-gather-start"):
                continue
            size = max((array.size for part in op.written for array in part), default=0)
            if size > most:
                yield f"{op.name} gathers {size >> 20} MiB of all devices at once"
