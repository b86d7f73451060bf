"""A recording as the basis of runs: `--replay`."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.request import SLO
from jaxserve.sched.slo.classes import with_targets
from jaxserve.simulator import replay, workload_flags
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.simulate import flags
from jaxserve.simulator.simulate.runs import Outcome, Recorded, Run
from jaxserve.simulator.simulate.sweep import Point
from jaxserve.simulator.workloads.workload import Workload

POOR_FIT = 0.5  # mean error of a step above which a ranking is doubtful


@dataclass(frozen=True)
class Replay:
    """A recording, ready to be simulated under any policy.

    Attributes:
        recording: The recording.
        workload: Its requests.
        system: The system fitted to its steps.
        notes: What is left out, and how good the fit is, one line each.
        slo: Targets of requests without their own.
    """

    recording: Recording
    workload: Recorded
    system: System
    notes: tuple[str, ...]
    slo: SLO

    def runs(self, args: argparse.Namespace) -> list[Run]:
        """A run for each policy, see `flags.runs`: with the seed of the recording, its prefix
        caching, and its system, unless the command line overrides them."""
        if args.seed is None:
            args.seed = self.recording.header.seed
        if args.prefix_caching is None:
            args.prefix_caching = self.recording.header.prefix_caching
        runs = flags.runs(args, self.workload)
        return runs if args.system else [self._on_the_recorded(run) for run in runs]

    def doubts(self, args: argparse.Namespace) -> tuple[str, ...]:
        """Lines to print before any ranking: that the fit is poor, if it is."""
        error = self.system.about["mean_error"]
        if args.system or error <= POOR_FIT:
            return ()
        return (
            f"doubtful: the simulated system is off by {error:.0%} of a recorded step on average, "
            "so that what follows may rank policies wrongly",
        )

    def _on_the_recorded(self, run: Run) -> Run:
        """The run on the recorded system. Settings that the command line does not override are
        those of the recording."""
        header = self.recording.header
        its_pool = run.kv_tokens is None and run.block_size is None
        return dataclasses.replace(
            run,
            system=self.system,
            num_blocks=header.num_blocks if its_pool else None,
            host_tokens=run.host_tokens or header.host_slots // 2,
            retention=header.retention if run.retention == LRU else run.retention,
            max_queue=header.max_queue if run.max_queue is None else run.max_queue,
            overlap=header.overlap,
        )

    def served(self, run: Run) -> Point:
        """The recorded outcome, to compare with runs like this one."""
        result = replay.served(self.recording)
        workload = with_slo(result.requests.workload, self.slo)
        requests = dataclasses.replace(result.requests, workload=workload)
        result = dataclasses.replace(result, requests=requests)
        outcome = Outcome.from_result(result, keep=run.keep)
        named = dataclasses.replace(
            run, policy=f"served: {self.recording.header.policy}", system=self.system
        )
        return Point(named, (outcome,), seed_matters=False)

    def as_json(self) -> dict[str, Any]:
        """Where and how it was recorded, ready for JSON."""
        header = self.recording.header
        return {
            "began": header.began,
            "policy": header.policy,
            "steps": len(self.recording.steps),
            "system": self.system.about,
            "host_s": self.system.host.as_dict(),
            "notes": list(self.notes),
        }


def read(args: argparse.Namespace) -> Replay:
    """Reads the recording that --replay names. ValueError if the file is not a recording."""
    recording = replay.read(args.replay)
    traffic, system = replay.traffic_of(recording), replay.system_of(recording, "recorded")
    slo = workload_flags.options(args)["slo"]
    fit = (
        f"fitted to {len(recording.steps)} steps of {recording.header.model} on "
        f"{recording.header.device}; mean error of one: {system.about['mean_error']:.1%}, drawn by "
        "the seed"
    )
    workload = Recorded(args.replay, with_slo(traffic.workload, slo))
    return Replay(recording, workload, system, (*recording.notes, *traffic.notes, fit), slo)


def with_slo(workload: Workload, slo: SLO) -> Workload:
    """The workload, with these targets for requests without their own."""
    return workload.with_terms(with_targets(workload.terms, slo))
