"""Flags that say what requests ask for, the same in the simulator and in a load test."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from jaxserve.sched.request import SLO
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.workloads.classes import SloClass, parse_classes
from jaxserve.sched.workloads.specs import MaxTokens
from jaxserve.sched.workloads.workload import WorkloadError

MOST = 2**31 - 1  # what arrays of int32 count to


def add_flags(parser: argparse.ArgumentParser, max_tokens: str) -> None:
    """Adds --slo_ttft_ms, --slo_tbt_ms, --slo_jct_ms, --classes and --max_tokens. max_tokens: what
    the help says of its default."""
    add = parser.add_argument
    add("--slo_ttft_ms", type=float, help="target of the time to first token")
    add("--slo_tbt_ms", type=float, help="target of each request's P99 time between tokens")
    add("--slo_jct_ms", type=float, help="target of the time to the last token")
    add(
        "--classes",
        help="requests with targets of their own, drawn by share: NAME:SHARE[:tier=best_effort]"
        "[:greedy=false]"
        "[:ttft=200ms][:tbt=50ms][:jct=60s], several separated by commas; the others have those "
        "of --slo_*",
    )
    add("--max_tokens", help=f"limit of requests that have none of their own: {max_tokens}")


def positive_int(text: str, most: int = MOST) -> int:
    """A flag's value from 1 to `most`. argparse says what is wrong with any other."""
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
    """The type of a flag whose value fits; argparse says of any other what the limits are."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r:.40}")
        return value

    return parse


seconds = number("a positive number of seconds", lambda value: 0 < value < math.inf)


def options(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as fields of `WorkloadSpec`: slo, classes, max_tokens. WorkloadError names the flag
    that is wrong."""
    return {
        "slo": SLO(**{name: _target(args, f"slo_{name}_ms") for name in TARGETS}),
        "classes": () if args.classes is None else _classes(args.classes),
        "max_tokens": _max_tokens(args.max_tokens),
    }


def _classes(text: str) -> tuple[SloClass, ...]:
    try:
        return parse_classes(text)
    except WorkloadError as error:
        raise WorkloadError(f"--classes: {error}") from error


def _target(args: argparse.Namespace, name: str) -> float | None:
    """Seconds."""
    value = getattr(args, name)
    if value is None:
        return None
    if not (math.isfinite(value) and value > 0):
        raise WorkloadError(f"--{name} must be a positive number, got {value}")
    return float(value) / 1e3


def _max_tokens(text: str | None) -> MaxTokens:
    if text is None:
        return None
    if text == "length":
        return "length"
    if not (text.isascii() and text.isdigit() and int(text[:10]) > 0):
        raise WorkloadError(f"--max_tokens must be a positive number or 'length', got {text!r:.40}")
    return int(text)
