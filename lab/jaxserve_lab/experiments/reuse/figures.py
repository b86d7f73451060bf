"""The part `figures`: what can be found is found, and what keys and plans cost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.engine.block_keys import BlockKeys
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.request import SLO, Request, SamplingParams, Tier
from jaxserve.sched.scheduler import Scheduler
from jaxserve.simulator.settings import EngineOptions
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.shared_prefixes import reusable_tokens
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve_lab.experiments.common.page import table
from jaxserve_lab.experiments.reuse.setting import Setting

SYSTEM, BLOCK = "llama-3-70b@4xa100", 16
TOKENS = 8192  # of the prompt whose keys are timed
POLICIES = ("sarathi", "goodput", "edf", "accelgen")
PROMPT, OUTPUT = 512, 60  # of the requests of which a plan is timed
ROUNDS = 5
CANDIDATES = (256, 1600)  # half of them wait


def part(setting: Setting) -> str:
    """Measures them, and makes the Markdown. ValueError for a trace that cannot be read."""
    sizes, times = ((16, 32), 3) if setting.quick else (CANDIDATES, 60)
    rows = [
        ["found of what any cache could find, " + _named(setting), "100%", f"{_hits(setting):.1%}"],
        [f"keys of {TOKENS:,} tokens", "1 ms", f"{_keys(times):.2f} ms"],
    ]
    for policy in POLICIES:
        few, many = (_plans(policy, size, times) for size in sizes)
        rows.append(
            [
                f"`{policy}`: a plan of {sizes[0]} requests, half of all blocks shared, over none; "
                f"of {sizes[1]:,}",
                "1.15; 1 ms",
                f"{few[1] / few[0]:.2f}; {1e3 * many[1]:.2f} ms ({1e3 * many[0]:.2f} without)",
            ]
        )
    return table(["what", "target", "measured"], rows)


def _named(setting: Setting) -> str:
    return "a trace" if setting.trace else "drawn conversations"


def _hits(setting: Setting) -> float:
    """Tokens found in a pool without end, simulated, over those that are there to be found."""
    if setting.trace:
        spec = WorkloadSpec(setting.trace, setting.num_requests, rate=setting.rate)
    else:
        spec = WorkloadSpec("conversation", 20 if setting.quick else 2000, rate=0.1)
    workload = replace(spec, max_tokens="length").make_workload(0)
    tokens = int(workload.lengths.total.sum()) + BLOCK * len(workload)
    place = system(SYSTEM)
    result = simulate(
        "sarathi", workload, place, engine=EngineOptions(prefix_caching=True, kv_tokens=tokens)
    )
    # The last block of a prompt is always computed.
    most = (workload.prompt_len - 1) // BLOCK * BLOCK
    found = result.requests.found
    assert found is not None
    return float(found.sum() / np.minimum(reusable_tokens(workload, BLOCK), most).sum())


def _keys(times: int) -> float:
    """Milliseconds that the keys of a prompt take."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 1 << 17, TOKENS).tolist()) for _ in range(times)]
    keys = BlockKeys(BLOCK)
    return 1e3 * _median(lambda prompt: keys.of(prompt, ""), prompts)


def _plans(policy: str, size: int, times: int) -> tuple[float, float]:
    """Seconds of a plan without anything shared, and with half of all blocks, in turns."""

    def timed(share: bool) -> float:
        view, chosen = _crowd(size, share=share).view, make_policy(policy)
        return _median(lambda _: chosen.plan(view, 0.2), range(times))

    rounds = [(timed(False), timed(True)) for _ in range(ROUNDS)]
    without, shared = map(statistics.median, zip(*rounds, strict=True))
    return without, shared


def _crowd(size: int, *, share: bool) -> Scheduler:
    """So many requests, of which the first half runs. share: whether all prompts begin alike, for
    half of their blocks."""
    blocks = PROMPT // BLOCK
    scheduler = Scheduler(
        make_policy("sarathi_pc", watermark=0.0),
        Limits(2 * size * PROMPT, 2 * size * PROMPT, size),
        num_blocks=4 * size * (blocks + 8),
        block_size=BLOCK,
        max_model_len=PROMPT + OUTPUT,
        capacity=size,
        cost_model=system("opt-13b@a100-40g").cost_model,
        prefix_caching=share,
    )
    common = [b"common%d" % i for i in range(blocks // 2)]

    def add(number: int) -> None:
        own = [b"%d.%d" % (number, i) for i in range(blocks // 2)]
        slo, tier = SLO(ttft=0.5 + number % 3, tbt=0.1), Tier(number % 2)
        keys = tuple(common + own) if share else None
        given = (str(number), (1,) * PROMPT, SamplingParams(max_tokens=OUTPUT), slo, tier)
        scheduler.add(Request(*given, arrival=0.001 * number, block_keys=keys))

    def step() -> None:
        scheduler.receive(scheduler.schedule(0.0).emitting, 0.0)

    for number in range(size // 2):
        add(number)
        if number == 0:
            step()  # the others find what it has computed
    for _ in range(4):
        step()
    for number in range(size // 2, size):
        add(number)
    for _ in range(64):
        scheduler.table.output_lengths.add(OUTPUT)
    scheduler.plan(0.0)  # now those who wait know what they find
    return scheduler


def _median(act: Callable[[Any], object], given: Any) -> float:
    """Of the thread's seconds."""
    seconds = []
    for one in given:
        began = time.thread_time()
        act(one)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)
