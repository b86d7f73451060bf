"""How long a plan takes (Apt-Serve section 6.6, Table 6)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bench import planning_time
from jaxserve.experiments.aptserve.setting import Scale
from jaxserve.experiments.common.claims import Row, Section, table

PAPER = {50: 0.3, 100: 0.5, 200: 1.0, 400: 2.1, 800: 4.8, 1600: 10.8}  # candidates: ms
POLICY = "aptserve"
Times = dict[str, dict[str, float]]  # situation: candidates: milliseconds


def measure(scale: Scale) -> Times:
    """On this machine, as `jaxserve bench plan` does."""
    return planning_time.measure(POLICY, scale.candidates, scale.plan_repeats)


def dump(times: Times, path: Path) -> None:
    """As JSON, milliseconds by situation and candidates; makes the folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"policy": POLICY, "plan_ms": times}, indent=1) + "\n", "utf-8")


def load(path: Path, candidates: Sequence[int]) -> Times | None:
    """What `dump` wrote; None if there is no such file, or it has other numbers of candidates.
    ValueError if it is something else."""
    if not path.exists():
        return None
    try:
        times = json.loads(path.read_text("utf-8"))["plan_ms"]
        known = all(list(found) == [str(n) for n in candidates] for found in times.values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not the times of an earlier run ({error})") from error
    return times if known else None


def section(scale: Scale, times: Times) -> Section:
    """Section 5 of the page: times in ms beside the paper's. KeyError if `times` lacks one of
    the scale's candidates."""
    header = ["candidates", *(f"{n:,}" for n in scale.candidates)]
    rows = [
        ["the paper", *(f"{PAPER[n]:g}" if n in PAPER else "" for n in scale.candidates)],
        *(
            [f"`{POLICY}`, {situation}", *(f"{found[str(n)]:.3f}" for n in scale.candidates)]
            for situation, found in times.items()
        ),
    ]
    most = scale.candidates[-1]
    slowest = max(found[str(most)] for found in times.values())
    paper = f"{PAPER[most]:g} ms" if most in PAPER else "no time"
    return Section(
        "5. The time of a plan (section 6.6, Table 6)",
        "Milliseconds of one plan, medians of the CPU's time, where half of those that run have "
        "hidden caches and: all requests decode; half of them do, and half wait for memory that "
        "lasts for some (mixed); all but an eighth wait (prefill); all decode, but the pool lacks "
        "half of the blocks that they need next (scarce). Measured as `jaxserve bench "
        "plan --policies=aptserve` does, on the machine that made this page.",
        [
            Row(
                f"{paper} with {most:,} requests",
                f"{slowest:.2g} ms in the slowest situation",
                "Arrays instead of loops over requests; and the paper's machine is another.",
            )
        ],
        [],
        [table(header, rows)],
    )
