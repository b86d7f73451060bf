"""Measures the engine's steps on this device, and fits a cost model to them.

    jaxserve profile --config=tiny_cpu --out=tiny.json
    jaxserve simulate --system=tiny.json --workload=sharegpt --rate=2

The engine and its flags are those of serve.py. The result is a system for the simulator, with
device and versions. Takes under two minutes for the built-in model on CPU, compilation included.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tqdm import tqdm

from jaxserve.command_line import Parser, exit_code
from jaxserve.config import Config, ConfigError
from jaxserve.configs import base
from jaxserve.engine.output import Output
from jaxserve.engine.startup import step_profile
from jaxserve.engine.startup.step_timer import Shape, StepTimer
from jaxserve.engine.stats import StepRecorder
from jaxserve.machine import machine, versions
from jaxserve.sched.cache.block_sizes import tokens_in
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cost.cost_model_fit import Fit, FitError, Sample, fit
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.saturation import flat_from
from jaxserve.sched.cost.served_steps import ServedSteps, fit_host
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import Request, SamplingParams
from jaxserve.server.startup import launch
from jaxserve.writable import check_file

DEFAULT_CONFIG = Path(base.__file__).parent / "tiny_cpu.py"
ROUNDS = 7
TIME_LIMIT = 60.0  # seconds after which no further round starts
HOST_STEPS = 60  # steps of each request that measures the host's part
HOST_SINGLES = 8
_QUALITY = ("r2", "mean_error", "worst_error", "leave_out_error")  # fields of a fit


def shapes(
    padding: Padding,
    *,
    max_rows: int,
    max_prefill: int,
    max_len: int,
    hidden: bool = False,
    swaps: bool = False,
) -> list[Shape]:
    """The shapes to measure: more than those that an engine times by itself
    (`step_profile.shapes`).

    They are every row bucket at four context lengths, every token bucket as one chunk and as
    several after different contexts, chunks beside decodes, and steps that sample.

    Args:
        padding: the engine's buckets.
        max_rows: most rows of a batch.
        max_prefill: most tokens of a batch with chunks.
        max_len: most tokens of a row.
        hidden: as in `step_profile.shapes`.
        swaps: as in `step_profile.shapes`.
    """
    limits: dict[str, int] = {"max_rows": max_rows, "max_prefill": max_prefill, "max_len": max_len}
    found = step_profile.shapes(padding, **limits, hidden=hidden, swaps=swaps)
    most = max(1, int(0.9 * max_len))
    lengths = sorted({max(1, int(max_len * share)) for share in (0.02, 0.25, 0.5)} | {most})
    quarter, half = max(1, max_len // 4), max(1, max_len // 2)
    for rows in (r for r in padding.rows if r <= max_rows):
        found += [Shape(decodes=(length,) * rows) for length in lengths]
        mixed = np.linspace(1, most, rows).astype(int)
        found.append(Shape(decodes=tuple(mixed.tolist())))
        found.append(Shape((quarter,) * rows, sampling=True))
    sizes = [t for t in padding.tokens if t <= max_prefill] or [max_prefill]
    for size in sizes:
        for before in (0, quarter, half):
            count = min(size, max_len - before)
            if count > 0:
                found.append(Shape(chunks=((count, before),)))
        found.append(Shape(chunks=((min(size, max_len), 0),), sampling=True))
        for parts in (2, 4):
            count = min(size // parts, max_len)
            if parts <= max_rows and count > 1:
                found.append(Shape(chunks=((count, 0),) * parts))
        for rows in (max_rows // 4, max_rows // 2, max_rows - 1):
            count = min(size - rows, half)
            if rows > 0 and count > 1:
                found.append(Shape((quarter,) * rows, ((count, 0),)))
                found.append(Shape((half,) * rows, ((count, min(quarter, max_len - count)),)))
    if hidden:
        reading = [s for s in found if s.contexts.any() and not (s.sampling or s.projected)]
        found += [dataclasses.replace(shape, hidden=True) for shape in reading]
        found += [Shape((quarter,), projected=length) for length in lengths]
    return list(dict.fromkeys(found))


Progress = Callable[[Iterable[int]], Iterable[int]]


def profile_engine(engine: Any, progress: Progress = iter) -> tuple[System, Fit, list[Sample]]:
    """Measures an engine that is built but not started. The host's part is measured by
    `measure_host`."""
    info, scheduler = engine.info(), engine._scheduler
    limits = scheduler.view.limits
    timer = StepTimer(engine.executor, info.num_blocks, info.vocab_size)
    wanted = shapes(
        timer.padding,
        max_rows=limits.max_rows,
        max_prefill=limits.max_prefill_tokens,
        max_len=min(info.max_model_len, info.pool_tokens),
        hidden=info.hidden_read is not None,
        swaps=scheduler.policy.moves_cache or scheduler.host.capacity > 0,
    )
    taken: list[list[float]] = [[] for _ in wanted]
    begin = time.perf_counter()
    # In rounds, so that a disturbance affects one sample of many shapes, not all of one shape.
    for number in progress(range(1 + ROUNDS)):
        for times, shape in zip(taken, wanted, strict=True):
            times.append(timer.seconds(shape))
        if number > 1 and time.perf_counter() - begin > TIME_LIMIT:
            break
    samples = [
        Sample(shape.features(timer.padding), statistics.median(times[1:]))  # the first is warm-up
        for times, shape in zip(taken, wanted, strict=True)
    ]
    found = fit(samples, info.num_layers, scheduler.view.cost_model.model.experts)
    # Copies were timed one direction at a time, with nothing beside them.
    model = dataclasses.replace(found.model, overlapped=engine.executor.copies_beside)
    found = dataclasses.replace(found, model=model)
    system = _system(info, limits, timer.padding, found)
    if isinstance(groups := scheduler.groups, StateGroups):
        states = {
            "state_groups": groups.count,
            "state_slots": groups.blocks * info.block_size,
            "kv_tokens": tokens_in(info.num_blocks, info.block_size),
        }
        system = dataclasses.replace(system, **states)
    about = {**system.about, "pivot": pivot(samples)}
    return dataclasses.replace(system, about=about), found, samples


def pivot(samples: Iterable[Sample]) -> dict[str, float]:
    """The measured step size from which throughput is flat (AccelGen section 3.1), among steps of
    prompts alone: its tokens and seconds, and the tokens of the largest such step. ValueError if
    there are no such steps."""
    least: dict[int, float] = {}
    for sample in samples:
        step, seconds = sample.features, sample.seconds
        others = step.num_decodes + step.prefill_m + step.hidden_prefill + step.sampled_rows
        if not others and step.num_prefills:
            least[step.num_tokens] = min(seconds, least.get(step.num_tokens, seconds))
    if not least:
        raise ValueError("no step of prompts alone was measured")
    sizes = np.array(sorted(least))
    times = np.array([least[size] for size in sizes.tolist()])
    first = flat_from(sizes, times)
    return {"tokens": int(sizes[first]), "seconds": float(times[first]), "largest": int(sizes[-1])}


def measure_host(engine: Any, system: System) -> HostOverhead:
    """Measures the engine thread's time for a step. Serves single requests one after the other,
    then half as many at once as fit into a batch, and then twice as many, so that half of them
    wait. Starts the engine if needed."""
    if engine._thread is None:
        engine.start()
    info, max_rows = engine.info(), system.max_rows or 1
    longest = min(info.max_model_len, info.pool_tokens)
    length = max(1, min(longest - HOST_STEPS - 1, 32))
    steps = min(HOST_STEPS, longest - length - 1)
    most = min(max_rows, info.pool_tokens // (length + steps))
    recorder = StepRecorder()
    engine.add_observer(recorder)
    for _ in range(HOST_SINGLES):
        _serve(engine, 1, length, min(steps, 4))
    _serve(engine, max(1, most // 2), length, steps)
    _serve(engine, max(1, min(2 * most, engine._scheduler.table.capacity)), length, steps)
    return fit_host(ServedSteps.from_steps(recorder.steps), system.cost_model)


def _serve(engine: Any, count: int, length: int, steps: int) -> None:
    """Serves `count` requests at once, with `length` prompt tokens and `steps` output tokens
    each."""
    done = threading.Semaphore(0)

    def on_output(output: Output) -> None:
        if output.finish_reason is not None:
            done.release()

    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
    for i in range(count):
        engine.submit(Request(f"host-{i}", (1,) * length, sampling), on_output)
    for _ in range(count):
        done.acquire()


def _system(info: Any, limits: Limits, padding: Padding, found: Fit) -> System:
    return System(
        f"{info.model}@{info.device}",
        found.model,
        kv_tokens=info.pool_tokens,
        max_batch_tokens=limits.max_batch_tokens,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_rows=limits.max_rows,
        block_size=info.block_size,
        padding=padding,
        rho=info.rho,
        projects=info.hidden_read == "projected",
        about={
            "source": "measured by jaxserve profile",
            "model": info.model,
            "dtype": info.dtype,
            "cache": info.cache_dtype,
            "device": info.device,
            "machine": machine(),
            "versions": versions(),
            **{name: getattr(found, name) for name in _QUALITY},
        },
    )


def report(system: System, samples: int) -> str:
    """The results as text for people."""
    about, model = system.about, system.cost_model
    flat = about["pivot"]
    r2 = ", ".join(f"{name} {value:.3f}" for name, value in about["r2"].items())
    lines = [
        f"{system.name} ({about['dtype']}): {samples} shapes, {model.num_layers} layers",
        f"  R^2               {r2}",
        f"  relative error    mean {about['mean_error']:.1%}, worst {about['worst_error']:.1%}, "
        f"left out {about['leave_out_error']:.1%}",
        f"  throughput        flat from {flat['tokens']} tokens per step on, "
        f"{1e3 * flat['seconds']:.3g} ms; measured up to {flat['largest']}",
        f"  host, ms per step   {host_ms(system.host)}",
        "  seconds per layer",
    ]
    lines += [
        f"    {name:<14} {value:.3e}"
        for name, value in model.coefficients.as_dict().items()
        if value
    ]
    return "\n".join(lines)


def host_ms(host: HostOverhead) -> str:
    """The nonzero terms, in milliseconds."""
    return ", ".join(f"{n} {1e3 * v:.3f}" for n, v in host.as_dict().items() if v) or "nothing"


def build(config: Config, *, progress: bool) -> Any:
    """Builds an engine without starting it."""
    # Imported late: jax takes seconds, and a wrong command line should answer at once.
    from jaxserve.engine.startup.build import build_engine

    return build_engine(launch.find_checkpoint(config), progress=progress)


def _check_out(path: str) -> None:
    """ConfigError if the file cannot be written. Checked before the measurement."""
    try:
        check_file("out", Path(path))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit codes: 0, 1 if measuring failed, 2 for a wrong command line."""
    parser = Parser(prog="jaxserve profile", description=__doc__)
    parser.add_argument("--out", default="profile.json", help="where to (profile.json)")
    args, rest = parser.parse_known_args(argv)
    values = flags.FlagValues()
    show = sys.stderr.isatty()
    try:
        launch.parse_flags(["jaxserve.profile", *rest], str(DEFAULT_CONFIG), values, parser.flags())
        _check_out(args.out)
        engine = build(launch.read_config(values), progress=show)
        try:
            system, _, samples = profile_engine(
                engine, lambda work: tqdm(work, desc="measuring", unit="round", disable=not show)
            )
            system = dataclasses.replace(system, host=measure_host(engine, system))
        finally:
            engine.stop()
        system.save(args.out)
    except (launch.UsageError, ConfigError, FitError, OSError) as error:
        print(f"jaxserve profile: {error}", file=sys.stderr)
        return 1 if isinstance(error, FitError) else exit_code(error)
    print(report(system, len(samples)))
    print(f"wrote {args.out}")
    return 0
