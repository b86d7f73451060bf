"""Compiles a model's programs for a target, on as few devices as it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.config import ConfigError
from jaxserve_lab.compile_check import toolchain
from jaxserve_lab.compile_check.case import CompileCase, Sizes, make_case
from jaxserve_lab.compile_check.compiling import (
    FAILED,
    NO_ROOM,
    NOT_CHECKED,
    NOT_SUPPORTED,
    Result,
    compile_program,
)
from jaxserve_lab.compile_check.programs import Program
from jaxserve_lab.compile_check.targets import Target

AUTO = 0  # as many devices as the model needs


@dataclass(frozen=True)
class Wish:
    """What to compile, and for which engine.

    Attributes:
        programs: In any order.
        sizes: The engine's configuration.
        backend: "auto", or an attention backend's name.
    """

    programs: Sequence[Program]
    sizes: Sizes
    backend: str


@dataclass(frozen=True)
class Checked:
    """One model on one target, checked.

    Attributes:
        model, target: What was checked.
        case: The layout that was compiled; None if nothing was.
        results: One for each program, or a single one that says why nothing was compiled.
        too_small: Why fewer devices are not enough, one line for each number tried.
    """

    model: str
    target: Target
    case: CompileCase | None
    results: list[Result]
    too_small: list[str] = field(default_factory=list)


def check_model(
    model: str, target: Target, count: int, wish: Wish, tell: Callable[[Result], None]
) -> Checked:
    """Compiles a model's programs for a target, on as few devices as it fits.

    Args:
        model: As for `model_shape`.
        target: The kind of device.
        count: Number of devices; AUTO tries powers of two until the model fits.
        wish: What to compile.
        tell: Called with each result at once.

    Raises:
        TargetError: The target has no group with that many devices.
    """

    def nothing(devices: int, status: str, reason: str) -> Checked:
        fits = False if status == NO_ROOM else None
        result = Result(target.name, model, devices, "all", status, fits=fits, reason=reason)
        tell(result)
        return Checked(model, target, None, [result], too_small)

    too_small: list[str] = []
    missing = toolchain.why_not(target)
    if missing is not None:
        return nothing(0, NOT_CHECKED, missing)
    counts = [count] if count != AUTO else _powers(target.most_devices)
    for devices in counts:
        mesh = toolchain.mesh(target, devices)
        try:
            case = make_case(model, target, mesh, wish.sizes, wish.backend)
        except ConfigError as error:
            too_small.append(f"{devices}: {error}")
            continue
        except ValueError as error:
            return nothing(devices, FAILED, str(error))
        last = devices == counts[-1]
        results = _compile_all(case, wish.programs, tell, stop_if_too_large=not last)
        if results is not None:
            return Checked(model, target, case, results, too_small)
        too_small.append(f"{devices}: the compiled step needs more memory than there is")
    return nothing(counts[-1], NO_ROOM, too_small[-1])


def _compile_all(
    case: CompileCase,
    programs: Sequence[Program],
    tell: Callable[[Result], None],
    stop_if_too_large: bool,
) -> list[Result] | None:
    """Compiles whole steps first, since they decide whether there is room; None if there is
    none."""
    results = []
    for program in sorted(programs, key=lambda program: not program.whole):
        if not program.applies(case):
            continue
        if program.hidden and case.no_hidden:
            about = (case.target.name, case.model, case.shards, program.name)
            result = Result(*about, NOT_SUPPORTED, reason=case.no_hidden)
        else:
            result = compile_program(case, program)
        if result.fits is False and stop_if_too_large:
            return None
        tell(result)
        results.append(result)
    return results


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]
