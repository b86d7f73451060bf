"""The optimum against the schedulers (InferMax section 5.1, Figure 15)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from jaxserve.simulator.optimal.replay import Replay
from jaxserve.simulator.optimal.solve import Problem, Solution, solve
from jaxserve.simulator.simulator import RULES, policy_under
from jaxserve.simulator.systems.presets import PRESETS
from jaxserve.simulator.workloads.workload import Workload, all_at_once, fixed_lengths
from jaxserve_lab.experiments.common.figures import save

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

    def above(self, policy: str) -> float:
        """By what share the policy takes longer than `best`."""
        return self.policies[policy].latency / self.best.latency - 1


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
