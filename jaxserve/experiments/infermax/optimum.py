"""The optimum against the schedulers (InferMax section 5.1, Figure 15)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from jaxserve.experiments.common.claims import Row, Scale, Section
from jaxserve.experiments.common.figures import Panel, chart, save
from jaxserve.sched.optimal.replay import Replay
from jaxserve.sched.optimal.solve import Problem, Solution, solve
from jaxserve.sched.simulation.simulator import RULES, policy_under
from jaxserve.sched.simulation.systems.presets import PRESETS
from jaxserve.sched.workloads.workload import Workload, all_at_once, fixed_lengths

POLICIES = ("vllm", "vllm+ef", "sarathi_pc", "sarathi_pc+ef")
SHORT = 32  # up to here the paper's optimum preempts
SHOWN = (8, 32, 64)


@dataclass(frozen=True)
class Instance:
    """O = B and I = prompt, M = max(2I, I + O - 1): two prompts fit, two requests do not."""

    prompt: int
    kv_tokens: int
    optimum: Solution
    policies: dict[str, Replay]

    @property
    def best(self) -> Replay:
        """The optimal schedule, or the best that was found in time."""
        assert self.optimum.replay is not None
        return self.optimum.replay

    @property
    def preemptions(self) -> int:
        """How often `best` takes a request's cache."""
        return self.best.schedule.preemptions


def solve_all(scale: Scale, time_limit: float, workers: int) -> list[Instance]:
    """One instance after the other, each on all cores, started from the best policy."""
    found = []
    for prompt in tqdm(scale.optimum, desc="optimal schedules", unit="run", file=sys.stderr):
        count = scale.optimum_requests
        memory = max(2 * prompt, prompt + count - 1)
        place = PRESETS["llama-2-7b@a100"]
        assert place.paper is not None
        problem = Problem(
            Workload.of(all_at_once(count), fixed_lengths(prompt, count, count)),
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


def _rows(instances: list[Instance]) -> list[Row]:
    proven = sum(one.optimum.status == "optimal" for one in instances)
    preempting = [one.prompt for one in instances if one.preemptions]
    keeping = [one.prompt for one in instances if not one.preemptions]

    def gain(names: tuple[str, ...], which: list[Instance]) -> str:
        """By how much the best of these takes longer than the optimum."""
        return ", ".join(
            f"{min(one.policies[n].latency for n in names) / one.best.latency - 1:.1%} "
            f"(I = {one.prompt})"
            for one in which
        )

    short = [one for one in instances if one.prompt <= SHORT]
    long = [one for one in instances if one.prompt > SHORT]
    free = ("vllm+ef", "sarathi_pc+ef")
    near = {
        name: max((one.policies[name].latency / one.best.latency - 1 for one in which), default=0.0)
        for name, which in (("vllm", short), ("vllm+ef", long))
    }
    return [
        Row("the optimum is found", f"proven for {proven} of {len(instances)} values of I"),
        Row(
            "for I <= 32 the optimum preempts, for I >= 64 it does not",
            f"it preempts for I of {_list(preempting)}, and not for {_list(keeping)}",
        ),
        Row(
            "I <= 32: preempting gains up to 17% over eviction-free schedules",
            f"`vllm+ef` and `sarathi_pc+ef` take longer than the optimum by {gain(free, short)}",
            WHY["short"],
        ),
        Row(
            "I >= 64: not preempting gains up to 40%",
            f"`vllm` takes longer than the optimum by {gain(('vllm',), long)}",
            WHY["long"],
        ),
        Row(
            "`vllm` comes close to it for I <= 32, `vllm+ef` for I >= 64",
            f"at most {near['vllm']:.1%} and {near['vllm+ef']:.1%} above it",
        ),
    ]


def section(scale: Scale, instances: list[Instance], figures: Path) -> Section:
    """Section 6 of the page: latencies over the optimum's (Figure 15), and the schedules of some I
    as pictures, both written into the folder `figures`."""
    lines = {
        name: (
            [one.prompt for one in instances],
            [one.policies[name].latency / one.best.latency for one in instances],
        )
        for name in POLICIES
    }
    chart(
        figures / "infermax-15-gap.png",
        [[Panel("latency over the optimum's", "ratio", lines, log_y=False)]],
        "I, tokens",
    )
    shown = [one for one in instances if one.prompt in SHOWN] or instances[:2]
    _pictures(figures / "infermax-15-schedules.png", shown)
    return Section(
        f"6. The optimum, O = B = {scale.optimum_requests} (section 5.1, Figure 15)",
        "M = max(2I, I + O - 1): two prompts fit at the same time, two whole requests do not. "
        "Whole prompts, so P = C. Solved with `sched/optimal/solve.py`, the schedules replayed.",
        _rows(instances),
        [
            ("infermax-15-gap.png", "What the schedulers take, relative to the optimum"),
            ("infermax-15-schedules.png", "Optimal schedules: requests by batches"),
        ],
        [_table(instances)],
    )


def _table(instances: list[Instance]) -> str:
    lines = [
        "| I | M | optimum, ms | bound, ms | status | preemptions | batches | "
        + " | ".join(f"`{name}`, ms" for name in POLICIES)
        + " |",
        "|---" * (7 + len(POLICIES)) + "|",
    ]
    for one in instances:
        assert one.optimum.objective is not None and one.optimum.bound is not None
        cells = [
            f"{one.prompt}",
            f"{one.kv_tokens}",
            f"{one.optimum.objective * 1e3:.3f}",
            f"{one.optimum.bound * 1e3:.3f}",
            one.optimum.status,
            f"{one.preemptions}",
            f"{len(one.best.schedule)}",
            *(f"{one.policies[name].latency * 1e3:.3f}" for name in POLICIES),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    rounding = max(one.optimum.rounding for one in instances)
    lines += [
        "",
        f"Time is counted in units of {instances[0].optimum.unit:g} s; that puts the bounds wrong "
        f"by {rounding:.1e} of their value at most, and they are lowered by as much.",
    ]
    return "\n".join(lines)


def _pictures(path: Path, instances: list[Instance]) -> None:
    from matplotlib.figure import Figure

    from jaxserve.figures import schedule_view

    figure = Figure(figsize=(7, 1.9 * len(instances) + 0.6), layout="constrained")
    panels = figure.subplots(len(instances), squeeze=False)
    for axes, one in zip(panels[:, 0], instances, strict=True):
        schedule_view.draw(axes, one.best, one.kv_tokens)
        title = f"I = {one.prompt}, M = {one.kv_tokens}: {one.best.latency * 1e3:.1f} ms"
        axes.set_title(title, loc="left", fontsize=9)
    figure.legend(handles=schedule_view.legend(), ncols=3, loc="outside lower center", fontsize=8)
    save(figure, path)


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) or "none"


WHY = {
    "short": (
        "At I = 1, M = 4 holds four prompts, so the gain is out of line there. Gains are relative "
        "to the optimum, which is how the paper's 17% and 40% come out."
    ),
    "long": "Relative to the optimum, as above.",
}
