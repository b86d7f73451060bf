"""Compiles one program and collects the compiler's results."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxserve.pallas_kernels.backends import compiling_for
from jaxserve.pallas_kernels.gpu_triton import tuning
from jaxserve_lab.compile_check import toolchain
from jaxserve_lab.compile_check.analysis.findings import Findings, find_problems
from jaxserve_lab.compile_check.case import BACKENDS, CompileCase
from jaxserve_lab.compile_check.programs import Program

COMPILED, FAILED, NO_ROOM = "compiled", "failed", "does not fit"
NOT_CHECKED, NOT_SUPPORTED = "not checked", "not supported"  # no compiler here; no such kernel

_MOSAIC_DUMP = "MOSAIC_GPU_DUMP_TO"  # read at each compilation
_KINDS = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}


@dataclass(frozen=True)
class Result:
    """The outcome of one program on one target.

    Attributes:
        target, model, devices, program: What was compiled; devices is their number.
        status: COMPILED, FAILED, NO_ROOM, NOT_CHECKED or NOT_SUPPORTED.
        seconds: Time of tracing, lowering and compiling.
        memory: Bytes on each device, by kind.
        needed: Most bytes that a device needs at one time.
        fits: Whether the device has that much. None for a kernel alone, since the device must hold
            more than its arguments.
        findings: The analysis of the compiled program.
        reason: Why it was not compiled; "" if it was.
    """

    target: str
    model: str
    devices: int
    program: str
    status: str
    seconds: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)
    needed: int = 0
    fits: bool | None = None
    findings: Findings = field(default_factory=Findings)
    reason: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it failed to compile, does not fit or has problems. Unchecked results are not
        bad."""
        failed = self.status in (FAILED, NO_ROOM)
        return failed or self.fits is False or bool(self.findings.problems)

    def as_json(self) -> dict[str, Any]:
        """All fields by name, including the findings' fields; kernels and loops are dicts, too."""
        fields = asdict(self)
        return fields | fields.pop("findings")


def compile_program(case: CompileCase, program: Program) -> Result:
    """Compiles one program. Errors of the compiler or of tracing are not raised, but returned as
    the result."""
    about = (case.target.name, case.model, case.shards, program.name)
    begin = time.perf_counter()
    with _folder(case) as folder, _target(case):
        try:
            lowered = program.lower(case)
            compiled = lowered.compile(compiler_options=_dumping(case, folder))
            seconds = time.perf_counter() - begin
            findings = find_problems(case, program, lowered, compiled.as_text() or "", folder)
        except Exception as error:  # compilers raise any type
            reason = _first_line(error)
            status = NO_ROOM if "RESOURCE_EXHAUSTED" in reason and _is_hbm(reason) else FAILED
            fits = False if status == NO_ROOM else None
            return Result(*about, status, time.perf_counter() - begin, fits=fits, reason=reason)
    memory, needed = _memory(compiled)
    fits = needed <= case.target.memory_bytes if program.whole else None
    return Result(*about, COMPILED, seconds, memory, needed, fits, findings)


@contextlib.contextmanager
def _target(case: CompileCase) -> Iterator[None]:
    """Kernels choose their sizes by device; here only the mesh has one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(case.mesh))
        if case.target.platform in BACKENDS:
            stack.enter_context(compiling_for(BACKENDS[case.target.platform]))
        if case.target.name in tuning.NAMED:
            stack.enter_context(tuning.compiling_for(tuning.NAMED[case.target.name]))
        yield


def _dumping(case: CompileCase, folder: Path) -> dict[str, Any] | None:
    """Makes XLA for GPUs dump the kernels' PTX and its list of launches, and nothing else. XLA for
    TPUs takes this only when it starts (see `toolchain.tpu_dump`)."""
    if case.target.platform != "cuda":
        return None
    # XLA of jax 0.12 dumps separately compiled kernels only on request.
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": False,
        "xla_dump_emitter_re": "ptx",
    }


@contextlib.contextmanager
def _folder(case: CompileCase) -> Iterator[Path]:
    """An empty folder for the compiler's dump."""
    if case.target.platform == "tpu":
        folder = toolchain.tpu_dump()
        for path in folder.iterdir():
            path.unlink()
        yield folder
    else:
        with tempfile.TemporaryDirectory() as name:
            os.environ[_MOSAIC_DUMP] = name  # for kernels that XLA does not dump
            try:
                yield Path(name)
            finally:
                del os.environ[_MOSAIC_DUMP]


def _memory(compiled: jax.stages.Compiled) -> tuple[dict[str, int], int]:
    stats: Any = compiled.memory_analysis()
    memory = {name: int(getattr(stats, attribute)) for name, attribute in _KINDS.items()}
    shared = memory["aliased"]  # an output that is an argument, such as the pool
    return memory, sum(memory.values()) - 2 * shared


def _is_hbm(reason: str) -> bool:
    """Whether the error is about the device's memory, not a kernel's on-chip memory."""
    return "HBM" in reason or "hbm" in reason


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
