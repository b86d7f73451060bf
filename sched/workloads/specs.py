"""Workloads from a few words, as the commands take them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.sched.workloads import lengths
from jaxserve.sched.workloads.traces import read_trace
from jaxserve.sched.workloads.workload import (
    Lengths,
    Workload,
    WorkloadError,
    all_at_once,
    fixed_lengths,
    gamma_arrivals,
    on_off_arrivals,
    poisson_arrivals,
)

ARRIVALS = ("all", "replay", "poisson", "gamma", "on_off")
DEFAULT_COUNT = 1000


@dataclass(frozen=True)
class WorkloadSpec:
    """lengths: `fixed:IxOxB` (prompt tokens, output tokens, requests), a mix such as `lilo+siso`, a
    data set of `lengths.DATA_SETS`, or the path of a trace. num_requests: how many, or the first so
    many of a trace; None for 1,000, or all of a trace.

    arrivals: `all` at once; `replay` as the trace has them; `poisson`; `gamma` with cv; `on_off`
    with mean period lengths on_s, off_s; None for the trace's own, or all at once, or poisson where
    there is a rate and no trace. rate: requests/s; stretches replayed ones.
    """

    lengths: str
    num_requests: int | None = None
    arrivals: str | None = None
    rate: float | None = None
    cv: float | None = None
    on_s: float | None = None
    off_s: float | None = None

    def __post_init__(self) -> None:
        kind, needs = self.arrivals, {"gamma": ("cv",), "on_off": ("on_s", "off_s")}
        if kind is not None and kind not in ARRIVALS:
            raise WorkloadError(f"arrivals must be one of {', '.join(ARRIVALS)}, got {kind!r}")
        for owner, names in needs.items():
            for name in names:
                given = getattr(self, name) is not None
                if given != (kind == owner):
                    raise WorkloadError(f"arrivals={owner} needs {name}, and only that does")
        if kind in ("poisson", "gamma", "on_off") and self.rate is None:
            raise WorkloadError(f"arrivals={kind} needs a rate")
        if kind == "all" and self.rate is not None:
            raise WorkloadError("arrivals=all has no rate")

    def make(self, seed: int = 0) -> Workload:
        """The workload; the same for the same seed. WorkloadError says what is wrong with it."""
        rng = np.random.default_rng((seed, 2))
        found = self._find(rng)
        count = self.num_requests
        if count is not None and len(found) != count:
            found = found.first(count)
        kind = self.arrivals
        if isinstance(found, Workload):
            if kind in (None, "replay"):
                return found if self.rate is None else found.at_rate(self.rate)
            found = found.lengths
        elif kind == "replay":
            raise WorkloadError(f"{self.lengths} has no arrivals to replay")
        if kind == "all" or self.rate is None:
            return Workload.of(all_at_once(len(found)), found)
        return Workload.of(self._arrivals(self.rate, len(found), rng), found)

    def _find(self, rng: np.random.Generator) -> Lengths | Workload:
        if self.lengths.startswith("fixed:"):
            shape = re.fullmatch(r"fixed:(\d{1,9})x(\d{1,9})x(\d{1,9})", self.lengths)
            if not shape:
                raise WorkloadError(f"fixed workloads are fixed:IxOxB, got {self.lengths!r}")
            prompt, output, count = (int(n) for n in shape.groups())
            if self.num_requests is not None:
                raise WorkloadError("fixed:IxOxB gives the number of requests already")
            return fixed_lengths(prompt, output, count)
        name = self.lengths.lower()
        if name in lengths.DATA_SETS or set(name.split("+")) <= set(lengths.GROUPS):
            return lengths.sampler(name)(self.num_requests or DEFAULT_COUNT, rng)
        if not Path(self.lengths).exists():
            known = ", ".join(lengths.names())
            raise WorkloadError(
                f"there is no workload or file {self.lengths!r}; known: fixed:IxOxB, {known}"
            )
        return read_trace(self.lengths)

    def _arrivals(self, rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
        if self.arrivals == "gamma":
            assert self.cv is not None
            return gamma_arrivals(rate, self.cv, count, rng)
        if self.arrivals == "on_off":
            assert self.on_s is not None and self.off_s is not None
            return on_off_arrivals(rate, self.on_s, self.off_s, count, rng)
        return poisson_arrivals(rate, count, rng)
