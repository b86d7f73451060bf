"""Flags for the requests' targets and limits, the same in the simulator and in load tests."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeVar

from jaxserve.sched.request import SLO
from jaxserve.sched.slo.classes import parse_classes
from jaxserve.sched.slo.slo_columns import ALL_TARGETS
from jaxserve.simulator.workloads.specs import MOST_PROGRAMS, MaxTokens
from jaxserve.simulator.workloads.workload import WorkloadError

T = TypeVar("T")
MOST = 2**31 - 1  # limit of int32 arrays


def add_flags(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Adds --slo_ttft_ms, --slo_tbt_ms, --slo_jct_ms, --slo_max_tbt_ms, --classes and --max_tokens.
    max_tokens: what the help says of its default."""
    add = parser.add_argument
    add("--slo_ttft_ms", type=positive, help="target of the time to first token")
    add("--slo_tbt_ms", type=positive, help="target of each request's P99 time between tokens")
    add("--slo_jct_ms", type=positive, help="target of the time to the last token")
    add(
        "--slo_max_tbt_ms",
        type=positive,
        help="target of each request's longest time between tokens (ten times its TBT target, at "
        "least 2000)",
    )
    add(
        "--classes",
        type=checked(parse_classes),
        help="requests with targets of their own, drawn by share: NAME:SHARE[:tier=best_effort]"
        "[:greedy=false][:value=3]"
        "[:ttft=200ms][:tbt=50ms][:jct=60s][:max_tbt=1s], several separated by commas; the others "
        "have those of --slo_*",
    )
    add(
        "--max_tokens",
        type=checked(_max_tokens),
        help=f"limit of requests that have none of their own: {max_tokens}",
    )


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Adds --programs and --program_deadline_ms."""
    parser.add_argument(
        "--programs",
        type=lambda text: positive_int(text, MOST_PROGRAMS),
        help="programs in progress at a time, instead of a rate, for closed sessions and traces "
        "with programs: another one begins when one has ended",
    )
    parser.add_argument(
        "--program_deadline_ms",
        type=positive,
        help="from the first call of a program to the end of its last (none, or the trace's)",
    )


def positive_int(text: str, most: int = MOST) -> int:
    """A flag's value from 1 to `most`. argparse reports any other."""
    try:
        value = int(text)
    except ValueError:
        limits = f"must be a whole number from 1 to {most}"
        raise argparse.ArgumentTypeError(f"{limits}, got {text!r:.40}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, got {value}")
    return value


def number(limits: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of a flag whose value fits; argparse reports the limits for any other."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r:.40}")
        return value

    return parse


positive = number("a positive number", lambda value: 0 < value < math.inf)
seconds = number("a positive number of seconds", lambda value: 0 < value < math.inf)


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The type of a flag whose text is read by `parse`; argparse shows its error message."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def checked(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """The type of a flag that stays text, after a check by `parse`."""

    def read(text: str) -> str:
        parsed(parse)(text)
        return text

    return read


def _max_tokens(text: str) -> MaxTokens:
    if text == "length":
        return "length"
    if not (text.isascii() and text.isdigit() and int(text[:10]) > 0):
        raise WorkloadError(f"must be a positive number or 'length', got {text!r:.40}")
    return int(text)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as fields of `WorkloadSpec`: slo, classes, max_tokens, program_deadline."""
    targets = {name: getattr(args, f"slo_{name}_ms") for name in ALL_TARGETS}
    given = {name: value / 1e3 for name, value in targets.items() if value is not None}
    classes = parse_classes(args.classes) if args.classes else ()
    max_tokens = _max_tokens(args.max_tokens) if args.max_tokens else None
    found = {"slo": SLO(**given), "classes": classes, "max_tokens": max_tokens}
    deadline = getattr(args, "program_deadline_ms", None)
    return found if deadline is None else {**found, "program_deadline": deadline / 1e3}
