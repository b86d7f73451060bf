"""The optimum against the schedulers (InferMax section 5.1, Figure 15)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxserve.simulator.optimal.replay import Replay
from jaxserve.simulator.optimal.solve import Problem, Solution, solve
from jaxserve.simulator.simulator import RULES, policy_under
from jaxserve.simulator.systems.presets import PRESETS
from jaxserve.simulator.workloads.workload import Workload, all_at_once, fixed_lengths
from jaxserve_lab.experiments.common.figures import Panel, save

POLICIES = ("vllm", "vllm+ef", "sarathi_pc", "sarathi_pc+ef")
SHORT = 32  # up to here the paper's optimum preempts
SHOWN = (8, 32, 64)


@dataclass(frozen=True)
class Instance:
    """A problem with O = B and I = prompt, M = max(2I, I + O - 1), and its schedules. Two prompts
    fit into M, two whole requests do not.

    Attributes:
        prompt: I.
        kv_tokens: M.
        optimum: What the solver found.
        policies: Their schedules, by name.
    """

    prompt: int
    kv_tokens: int
    optimum: Solution
    policies: dict[str, Replay]

    @property
    def best(self) -> Replay:
        """The optimal schedule, or the best one found in time."""
        assert self.optimum.replay is not None
        return self.optimum.replay

    @property
    def preemptions(self) -> int:
        """Number of preemptions of `best`."""
        return self.best.schedule.preemptions

    def above(self, *policies: str) -> float:
        """By what share the best of the policies takes longer than `best`."""
        return min(self.policies[name].latency for name in policies) / self.best.latency - 1

    def row(self) -> list[str]:
        """Its line of a table."""
        optimum, ms = self.optimum, "{:.3f}".format
        assert optimum.objective is not None and optimum.bound is not None
        row = [f"{self.prompt}", f"{self.kv_tokens}", ms(1e3 * optimum.objective)]
        row += [ms(1e3 * optimum.bound), optimum.status, f"{self.preemptions}"]
        row += [f"{len(self.best.schedule)}"]
        return row + [ms(1e3 * self.policies[name].latency) for name in POLICIES]

    def by_itself(self) -> str:
        """The command that finds the optimum."""
        assert self.optimum.objective is not None
        count = self.best.schedule.tokens.shape[1]
        return (
            f"One point by itself, I = {self.prompt}, `latency` "
            f"{1e3 * self.optimum.objective:.3f} ms (with the extra `optimal`):\n\n"
            f"    jaxserve optimal --workload=fixed:{self.prompt}x{count}x{count} "
            f"--kv_tokens={self.kv_tokens} --whole_prompts"
        )


def solve_all(
    prompts: Sequence[int], count: int, time_limit: float, workers: int
) -> list[Instance]:
    """Solves an instance for each prompt length, one after the other, starting from the best
    policy's schedule.

    Args:
        prompts: I of each.
        count: B and O.
        time_limit: Seconds for each.
        workers: Threads of the solver.
    """
    found = []
    for prompt in tqdm(prompts, desc="optimal schedules", unit="run", file=sys.stderr):
        memory = max(2 * prompt, prompt + count - 1)
        place = PRESETS["llama-2-7b@a100"]
        assert place.paper is not None
        problem = Problem(
            Workload.create(all_at_once(count), fixed_lengths(prompt, count, count)),
            place.paper,
            kv_tokens=memory,
            # P = C for all of them: a prompt is never cut, the batches hold M tokens at most.
            max_batch_tokens=max(place.max_batch_tokens, memory),
            chunked=False,
        )
        rules = RULES["infermax_paper"]
        policies = {
            name: problem.play(problem.record(policy_under(name, rules))) for name in POLICIES
        }
        start = min(policies.values(), key=lambda played: played.latency)
        optimum = solve(problem, warm_start=start.schedule, time_limit=time_limit, workers=workers)
        found.append(Instance(prompt, memory, optimum, policies))
    return found


def said(found: Sequence[Instance]) -> dict[str, Any]:
    """What a page says of the instances."""
    short = [one for one in found if one.prompt <= SHORT]
    long = [one for one in found if one.prompt > SHORT]

    def prompts(which: Iterable[Instance]) -> str:
        return ", ".join(str(one.prompt) for one in which) or "none"

    def above(which: Iterable[Instance], *names: str) -> str:
        return ", ".join(f"{one.above(*names):.1%} (I = {one.prompt})" for one in which)

    return {
        "proven": sum(one.optimum.status == "optimal" for one in found),
        "count": len(found),
        "preempting": prompts(one for one in found if one.preemptions),
        "keeping": prompts(one for one in found if not one.preemptions),
        "short": above(short, "vllm+ef", "sarathi_pc+ef"),
        "long": above(long, "vllm"),
        "near": max((one.above("vllm") for one in short), default=0.0),
        "near_free": max((one.above("vllm+ef") for one in long), default=0.0),
        "unit": found[0].optimum.unit,
        "rounding": max(one.optimum.rounding for one in found),
    }


def gaps(found: Sequence[Instance]) -> Panel:
    """What the policies take over what the best schedule does."""
    prompts = [one.prompt for one in found]
    lines = {
        name: (prompts, [one.policies[name].latency / one.best.latency for one in found])
        for name in POLICIES
    }
    return Panel("latency over the optimum's", "ratio", lines)


def draw(instances: Sequence[Instance], path: Path) -> None:
    """Draws the instances' best schedules."""
    from matplotlib.figure import Figure

    from jaxserve.simulator.optimal import schedule_view

    figure = Figure(figsize=(7, 1.9 * len(instances) + 0.6), layout="constrained")
    panels = figure.subplots(len(instances), squeeze=False)
    for axes, one in zip(panels[:, 0], instances, strict=True):
        schedule_view.draw(axes, one.best, one.kv_tokens)
        title = f"I = {one.prompt}, M = {one.kv_tokens}: {one.best.latency * 1e3:.1f} ms"
        axes.set_title(title, loc="left", fontsize=9)
    figure.legend(handles=schedule_view.legend(), ncols=3, loc="outside lower center", fontsize=8)
    save(figure, path)
