"""Policies that take turns at serving, each on its own engine with the same small pool, so that
drift of the machine affects all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jaxserve.bench import runs
from jaxserve.bench.command import BenchParser
from jaxserve.bench.load_target import EngineTarget, check_fits
from jaxserve.command_line import print_result
from jaxserve.commands.profile import build
from jaxserve.config import Config
from jaxserve.machine import machine, versions
from jaxserve.sched.registry import make_policy
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator import replay
from jaxserve.simulator.replay import Recording
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.workloads.workload import Workload
from jaxserve_lab.bench.policy_names import policy_names

if TYPE_CHECKING:  # jax takes seconds; errors in the command line should come at once
    from jaxserve.engine.engine import Engine

HOST_GIB = 0.0625  # of host memory for checkpoints, for policies that make them
WARM_UP = 8  # requests
RECORD_MIB = 1024  # practically without limit


class TurnsParser(BenchParser):
    """The parser of a command whose policies take turns.

    Args:
        name: The command's name.
        description: Text for --help.
        policies: Default of --policies.
    """

    def __init__(self, name: str, description: str | None, policies: Sequence[str]) -> None:
        super().__init__(name, description=description)
        known = ",".join(policies)
        help_text = "names, separated by commas (%(default)s)"
        self.add_argument("--policies", default=known, help=help_text)

    def parse(self, argv: Sequence[str]) -> Namespace:
        """Parses and checks the command line, with `policies` as a list and the engine's
        configuration as `config`. Raises UsageError or ConfigError."""
        args, _ = self.parse_serving(argv)
        args.policies = policy_names(args.policies)
        check_unrecorded(args.config, args.command)
        return args


def check_unrecorded(config: Config, command: str) -> None:
    """Raises UsageError for a configuration that makes the engine record."""
    if config.engine.record:
        raise UsageError(f"--config.engine.record: {command} makes recordings of its own")


def configured(
    config: Config, policy: str, record: Path, *, requests: int, longest: int, num_blocks: int
) -> Config:
    """The configuration for one policy, which also records everything.

    Args:
        config: The user's; its pool and request sizes take precedence.
        policy: The policy's name.
        record: The recording's file.
        requests: Least room in the queue.
        longest: Most tokens of a request.
        num_blocks: Blocks of the pool.
    """
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
    """Builds and starts an engine for each configuration, warms it up with WARM_UP requests, and
    stops all of them at the end. Raises ConfigError for engines that cannot be built, and
    BenchError for loads that do not fit."""
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
    """Simulates served requests under the same policy.

    Args:
        recording: A recording in which these requests were served without others.
        first: Number of the first request.
        count: Number of requests.
        own_steps: Whether the simulated system is also fitted to their own steps, if there are no
            others.

    Returns:
        The recording of these requests, and their simulation.

    Raises:
        RecordingError: There are too few steps to fit a system.
    """
    steps = recording.steps
    if not own_steps:
        steps = steps.select(~recording.within(first, first + count))
    system = replay.system_of(dataclasses.replace(recording, steps=steps))
    part = recording.part(first, first + count)
    return part, replay.again(part, system, record_rows=True)


def in_turns(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(turn, name) for each name in each turn: all names once, then all again. Shows a progress
    bar."""
    all_of_them = [(turn, name) for turn in range(repeats) for name in names]
    return iter(tqdm(all_of_them, desc="serving", unit="turn", disable=not sys.stderr.isatty()))


def show(
    args: Namespace, measure: Callable[[Namespace], dict[str, Any]], text: Callable[..., str]
) -> int:
    """Measures, prints, and returns the exit code. `measure` returns the command's own part of the
    JSON object, with a `model`; the arguments and the machine are added here."""
    asked = {name: value for name, value in vars(args).items() if name != "config"}
    where, measured = machine(), measure(args)
    result = {
        "command": args.command,
        "workload": asked,
        **measured,
        "model": {**measured["model"], "policy": ",".join(args.policies)},
        "config": args.config.as_dict(),
        "machine": where,
        "versions": versions(),
    }
    print_result(args, text(result), result)
    return 0
