"""Policies that take turns at serving, each on an engine of its own with the same small pool, so
that what drifts on the machine falls on all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from jaxserve.bench import runs
from jaxserve.bench.load_target import EngineTarget, check_fits
from jaxserve.config import Config
from jaxserve.profile import build
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation.recording import replay
from jaxserve.sched.simulation.recording.replay import Recording
from jaxserve.sched.simulation.results import SimulationResult
from jaxserve.sched.workloads.workload import Workload
from jaxserve.server.startup.launch import UsageError

if TYPE_CHECKING:  # jax takes seconds, and a wrong command line should answer at once
    from jaxserve.engine.engine import Engine

HOST_GIB = 0.0625  # of host memory for checkpoints, for policies that make them
WARM_UP = 8  # requests
RECORD_MIB = 1024  # as good as without limit


def policy_names(text: str) -> list[str]:
    """Those of the flag --policies, separated by commas. UsageError for one that is none."""
    names = text.split(",")
    for name in names:
        try:
            make_policy(name)
        except ValueError as error:
            raise UsageError(f"--policies: {error}") from error
    return names


def check_numbers(
    args: Namespace, positive: Sequence[str], at_least: Sequence[tuple[str, int]]
) -> None:
    """UsageError for a flag that is out of range. at_least: names of whole numbers, and what each
    is at least."""
    for name in positive:
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} must be a positive number, got {value}")
    for name, least in at_least:
        if getattr(args, name) < least:
            raise UsageError(f"--{name} must be at least {least}, got {getattr(args, name)}")


def configured(
    config: Config, policy: str, record: Path, *, requests: int, longest: int, num_blocks: int
) -> Config:
    """For one policy, with room for so many requests, and a recording of all that is served. The
    pool has num_blocks, and a request at most `longest` tokens, unless the configuration says
    otherwise."""
    cache, least = config.cache, HOST_GIB if make_policy(policy).moves_cache else 0.0
    return config.with_fields(
        scheduler__policy=policy,
        scheduler__params={},
        scheduler__max_queue=max(config.scheduler.max_queue, requests),
        engine__max_model_len=config.engine.max_model_len or longest,
        engine__record=str(record),
        engine__record_mib=RECORD_MIB,
        cache__num_blocks=cache.num_blocks or num_blocks,
        cache__host_gib=cache.host_gib or least,
    )


@contextlib.contextmanager
def engines(
    configs: Mapping[str, Config], loads: Sequence[Workload], seed: int
) -> Iterator[dict[str, Engine]]:
    """One for each configuration, started, and warm: WARM_UP requests have been served. ConfigError
    for what cannot be built, BenchError for loads that do not fit."""
    built: dict[str, Engine] = {}
    try:
        for name, config in configs.items():
            engine = built[name] = build(config, progress=sys.stderr.isatty())
            engine.start()
            target = EngineTarget(engine)
            for load in loads:
                check_fits(load, target.info())
            runs.warm_up(target, WARM_UP, 32, 8, seed)
        yield built
    finally:
        for engine in built.values():
            engine.stop()


def again(
    recording: Recording, first: int, count: int, *, own_steps: bool
) -> tuple[Recording, SimulationResult]:
    """Requests number `first` on, `count` of them, which were alone then: what is recorded of them,
    and the same traffic simulated under the policy that served it, on a system fitted to the other
    steps. own_steps: to theirs, too, for want of others. RecordingError if they say too little."""
    steps = recording.steps
    if not own_steps:
        steps = steps.take(~recording.within(first, first + count))
    system = replay.system_of(dataclasses.replace(recording, steps=steps))
    part = recording.part(first, first + count)
    return part, replay.again(part, system, record_rows=True)


def in_turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(number of the turn, whose it is): all names once, then all again. Shows how far it is."""
    all_of_them = [(turn, name) for turn in range(repeats) for name in names]
    return iter(tqdm(all_of_them, desc="serving", unit="turn", disable=not sys.stderr.isatty()))
