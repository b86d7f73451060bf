"""Makes docs/infermax.md: what InferMax (arXiv 2411.07447) claims, and what the simulator says.

    python -m jaxserve_lab.experiments.infermax --azure=AzureLLMInferenceTrace_conv.csv

--azure is the hour of conversations of Azure's public dataset of 2023; without it the seventh
comparison is left out, and the page says so.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

from jaxserve.simulator.workloads.lengths import MIXES
from jaxserve_lab.experiments.common.figures import Panel, panel
from jaxserve_lab.experiments.common.page import Extreme, Page, ends, flags, write_page
from jaxserve_lab.experiments.common.runs import Results
from jaxserve_lab.experiments.infermax.case import UNLIMITED, InferMaxCase, Numbers, run
from jaxserve_lab.experiments.infermax.optimum import POLICIES as PLAYED
from jaxserve_lab.experiments.infermax.optimum import SHORT, SHOWN, Instance, draw, solve_all

EF = "+ef"
PLAIN = ("vllm", "sarathi", "sarathi_pc")
LOW = (*PLAIN, "sarathi_nohy")
RANKED = ("rank_org", "rank_i", "rank_o")
FREE = "sarathi+ef"  # the same batches, and nothing computed twice
# As the authors' simulator has them: chunks may be as long as the batch, and a request that finds
# no memory does not block those behind it.
AUTHORS = (("full_prefill", True), ("probing", True))
LABELS = {
    "latency": "latency, s",
    "ttft": "TTFT, s",
    "tpot": "TPOT, s",
    "preemptions": "preemptions",
    "tps": "tokens/s",
}

QUICK_AZURE = 200  # requests
AZURE_ON, AZURE_M = "llama-3-70b@4xa100", 100_000
BOUND = "vllm, M unlimited"
Switches = tuple[tuple[str, bool | str], ...]
PC: Switches = (("full_prefill", True),)
INFERMAX: dict[str, Switches] = {
    "infermax": (*PC, ("expect", "candidate")),
    "infermax, sorting only": (*PC, ("expect", "nothing")),
    "infermax, histogram only": (*PC, ("expect", "candidate"), ("longest_first", False)),
    "infermax, reserve for all": (*PC, ("expect", "running")),
    "infermax, P = 512": (("full_prefill", False), ("expect", "candidate")),
}
Where = Mapping[str, Callable[[str], InferMaxCase]]  # the case of a policy, by what it is called


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        prompts: I.
        outputs: O.
        few, many: B at low and at high contention.
        kv_tokens: M.
        memories: M where it is varied.
        mixed: B of the mixes.
        optimum: I where the optimum is solved for.
        optimum_requests: B and O there.
        between: More values of I, where M decides how many requests fit.
    """

    prompts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    outputs: tuple[int, ...] = (1, 32, 1024)
    few: int = 32
    many: int = 1024
    kv_tokens: int = 100_000
    memories: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000)
    mixed: tuple[int, ...] = (16, 64, 256, 1024)
    optimum: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    optimum_requests: int = 4
    between: tuple[int, ...] = (3, 24, 48, 96, 140, 220, 305, 470, 700)


QUICK = Scale((1, 64), (1, 8), 4, 48, 20_000, (100, 1_000), (8, 16), (2, 64), 2, (24,))


class InferMax(Page[InferMaxCase, Numbers]):
    """What the template beside this asks for."""

    name, kind, rules = "infermax", InferMaxCase, "the rules `infermax_paper`"
    scale: Scale
    held = (
        *(InferMaxCase(policy, "fixed:128x32x1024", 100_000) for policy in (*PLAIN, FREE)),
        *(InferMaxCase(policy, "lilo+siso", 100_000, 64) for policy in RANKED),
        InferMaxCase("infermax", "lilo+siso", 100_000, 64, switches=INFERMAX["infermax"]),
    )
    free, plain = FREE, PLAIN

    def __init__(self, args: Namespace, results: Results[InferMaxCase, Numbers]) -> None:
        super().__init__(QUICK if args.quick else Scale(), results)
        self.azure, self._count = args.azure, QUICK_AZURE if args.quick else None
        self._time_limit, self._jobs = args.time_limit, args.jobs

    def fixed(
        self, policy: str, i: int, o: int, requests: int = 0, kv_tokens: int = 0
    ) -> InferMaxCase:
        """Requests of one size that arrive together.

        Args:
            policy: Its name.
            i, o: Tokens in and out.
            requests: B; 0 for the scale's `many`.
            kv_tokens: M; 0 for the scale's.
        """
        count = requests or self.scale.many
        return InferMaxCase(policy, f"fixed:{i}x{o}x{count}", kv_tokens or self.scale.kv_tokens)

    def mixed(self, policy: str, mix: str, count: int, probing: bool = False) -> InferMaxCase:
        """Requests of a mix, in the same order for every policy.

        Args:
            policy: Its name.
            mix: Name of the mix.
            count: B.
            probing: Whether the policy runs as the authors run it.
        """
        switches = AUTHORS if probing and policy != FREE else ()
        return InferMaxCase(policy, mix, self.scale.kv_tokens, count, switches=switches)

    # Where policies are compared.

    def low(self, *outputs: int) -> Where:
        """Low contention: B is the scale's `few`, so that all requests fit into M together.
        outputs: O; all by default."""
        return self._grid(outputs or self.scale.outputs, self.scale.few)

    def high(self) -> Where:
        """High contention: B is the scale's `many`."""
        return self._grid(self.scale.outputs)

    def _grid(self, outputs: Sequence[int], requests: int = 0) -> Where:
        return {
            f"I = {i}, O = {o}": partial(self.fixed, i=i, o=o, requests=requests)
            for i, o in product(self.scale.prompts, outputs)
        }

    def longest(self) -> Where:
        """High contention with the largest O."""
        return self._of_output(self.scale.outputs[-1])

    def _of_output(self, o: int) -> Where:
        return {f"I = {i}": partial(self.fixed, i=i, o=o) for i in self.scale.prompts}

    def within(self, memory: int) -> Where:
        """Varied memory: M = memory tokens, O is the scale's second, and I such that a whole
        request of I + O - 1 tokens fits."""
        o = self.scale.outputs[1]
        return {
            f"I = {i}": partial(self.fixed, i=i, o=o, kv_tokens=memory)
            for i in self._fitting(memory)
        }

    def _fitting(self, memory: int) -> list[int]:
        every = sorted({*self.scale.prompts, *self.scale.between})
        return [i for i in every if i + self.scale.outputs[1] - 1 <= memory]

    def mixes(self, which: str, probing: bool) -> Where:
        """Mixes at each B. which: lilo, no lilo, apart (all but lilo+liso) or all."""
        wanted = {
            "all": MIXES,
            "lilo": [mix for mix in MIXES if "lilo" in mix],
            "no lilo": [mix for mix in MIXES if "lilo" not in mix],
            "apart": [mix for mix in MIXES if mix != "lilo+liso"],
        }
        return {
            f"{mix.upper()}, B = {n}": partial(self.mixed, mix=mix, count=n, probing=probing)
            for mix, n in product(wanted[which], self.scale.mixed)
        }

    # What comes of it.

    def numbers_of(self, number: str, policy: str, at: Callable[[str], InferMaxCase]) -> float:
        """The policy's number there."""
        return float(getattr(self.results[at(policy)], number))

    def ratios(self, number: str, above: str, below: str, where: Where) -> dict[str, float]:
        """One policy's number over another's, by label. Left out where the other's is 0, as TPOT at
        O = 1.

        Args:
            number: A field of `Numbers`.
            above, below: The two policies.
            where: The cases to compare on.
        """
        return {
            label: self.numbers_of(number, above, at) / self.numbers_of(number, below, at)
            for label, at in where.items()
            if self.numbers_of(number, below, at)
        }

    def most(self, number: str, above: str, below: str, where: Where) -> Extreme:
        """The largest of the ratios. See `ratios`."""
        return Extreme.of_values(self.ratios(number, above, below, where))

    def most_by_itself(self, number: str, above: str, below: str, where: Where) -> str:
        """The command that gives the largest of the ratios.

        Args:
            number, above, below, where: As in `ratios`.
        """
        at = where[self.most(number, above, below, where).where]
        return self.by_itself(number, at(above), at(below))

    def preemptions(self, policies: Sequence[str], where: Where) -> int:
        """Preemptions in all of the runs."""
        return sum(self.results[at(p)].preemptions for p in policies for at in where.values())

    # Sections 1 and 2: low and high contention.

    def low_runs(self) -> str:
        """Preemptions in all runs at low contention."""
        count = len(LOW) * len(self.low())
        return f"{self.preemptions(LOW, self.low())} in {count} runs"

    def lost(self) -> float:
        """The largest ratio of `vllm`'s latency to another policy's."""
        return max(
            value
            for p in LOW[1:]
            for value in self.ratios("latency", "vllm", p, self.low()).values()
        )

    def behind(self, o: int) -> str:
        """The latency of `sarathi_nohy` over `vllm`'s, for the longest prompts."""
        found = self.ratios("latency", "sarathi_nohy", "vllm", self.low(o))
        steps = [f"{found[f'I = {i}, O = {o}']:.2f}x (I = {i})" for i in self.scale.prompts[-4:]]
        return f"{', '.join(steps)} at O = {o}"

    def best(self) -> str:
        """Where `sarathi_pc` is within 1% of the highest throughput."""
        where = self.high()
        count = sum(
            self.numbers_of("tps", PLAIN[-1], at)
            >= 0.99 * max(self.numbers_of("tps", p, at) for p in PLAIN)
            for at in where.values()
        )
        return f"{count} of {len(where)} settings"

    def preempted(self, policy: str) -> str:
        """Summed over I."""
        return ", ".join(
            f"{self.preemptions([policy], self._of_output(o)):,} (O = {o})"
            for o in self.scale.outputs
        )

    def by_prompt(self, file: str, caption: str, which: str) -> str:
        """A figure, numbers in rows, O in columns. which: low or high. At O = 1 there is no TPOT,
        and no request outgrows its prompt, so that none is preempted."""
        numbers = ["latency", "ttft", "tpot", *(["preemptions"] if which == "high" else [])]
        requests, policies = (self.scale.few, LOW) if which == "low" else (0, PLAIN)
        panels: list[list[Panel | None]] = [
            [
                panel(
                    f"O = {o}",
                    LABELS[number],
                    policies,
                    self.scale.prompts,
                    lambda policy, i, o=o, number=number: self.numbers_of(
                        number, policy, partial(self.fixed, i=i, o=o, requests=requests)
                    ),
                    log_y=number != "preemptions",
                )
                if o > 1 or number not in ("tpot", "preemptions")
                else None
                for o in self.scale.outputs
            ]
            for number in numbers
        ]
        return self.chart(file, caption, panels, "I, tokens")

    # Sections 3 and 4: preemptions, and the size of the cache.

    def eviction_free(self) -> str:
        """A figure."""
        o = self.scale.outputs[-1]
        panels = [
            panel(
                LABELS[number],
                LABELS[number],
                [p + v for p in PLAIN for v in ("", EF)],
                self.scale.prompts,
                lambda policy, i, number=number: self.numbers_of(
                    number, policy, partial(self.fixed, i=i, o=o)
                ),
                log_y=number != "tps",
            )
            for number in ("tps", "ttft", "tpot")
        ]
        caption = "Eviction-free schedulers (dashed) and their originals against I"
        return self.chart("infermax-8-eviction-free.png", caption, [panels], "I, tokens")

    def batch_sizes(self) -> str:
        """How many requests run at once."""
        scale, o = self.scale, self.scale.outputs[-1]
        return ", ".join(
            f"{self.results[self.fixed('vllm+ef', i, o)].batch_size:.0f} at I = {i} (M / (I + O) = "
            f"{scale.kv_tokens / (i + o):.0f})"
            for i in (scale.prompts[0], scale.prompts[-1])
        )

    def tps_range(self, policy: str, memory: int) -> str:
        """TPS with preemptions over TPS without."""
        found = self.ratios("tps", policy, policy + EF, self.within(memory))
        return f"`{policy}` " + " to ".join(f"{found[at]:.2f}x ({at})" for at in ends(found))

    def used(self) -> float:
        """The most of the largest M that `sarathi` uses on average."""
        places = self.within(self.scale.memories[-1]).values()
        return max(self.numbers_of("kv_used", "sarathi", at) for at in places)

    def by_memory(self) -> str:
        """A figure: TPS above TPOT, a column an M."""
        panels = [
            [
                panel(
                    f"M = {memory:,}",
                    LABELS[number],
                    [p + v for p in PLAIN[:2] for v in ("", EF)],
                    self._fitting(memory),
                    lambda policy, i, memory=memory, number=number: self.numbers_of(
                        number, policy, self.within(memory)[f"I = {i}"]
                    ),
                    log_y=True,
                )
                for memory in self.scale.memories
            ]
            for number in ("tps", "tpot")
        ]
        caption = "TPS and TPOT against I, by M; eviction-free ones dashed"
        return self.chart("infermax-9-memory.png", caption, panels, "I, tokens")

    # Section 5: ranking requests by their lengths.

    def ranks(self, number: str, by: str, others: Sequence[str], which: str) -> str:
        """How much less of a number one ranking has than the others, plain and probing.

        Args:
            number: A field of `Numbers`.
            by: The policy that ranks.
            others: Policies to compare with.
            which: As in `mixes`.
        """
        return "; probing: up to ".join(
            " and ".join(
                f"{self.most(number, other, by, self.mixes(which, probing)).times()} than `{other}`"
                for other in others
            )
            for probing in (False, True)
        )

    def by_count(self) -> str:
        """A figure: a row per number, a column per mix."""
        panels = [
            [
                panel(
                    mix.upper(),
                    LABELS[number],
                    RANKED,
                    self.scale.mixed,
                    lambda policy, n, mix=mix, number=number: self.numbers_of(
                        number, policy, partial(self.mixed, mix=mix, count=n)
                    ),
                    log_y=True,
                )
                for mix in MIXES
            ]
            for number in ("latency", "ttft", "tpot")
        ]
        caption = "Latency, TTFT and TPOT against B, by mix"
        return self.chart("infermax-10-ranks.png", caption, panels, "B, requests")

    # Section 6: the optimum.

    def optimum(self) -> dict[str, Any]:
        """What is said of it; nothing while simulations are missing, as it takes its time."""
        if not self.results.complete:
            return {}
        found = self._instances
        short = [one for one in found if one.prompt <= SHORT]
        long = [one for one in found if one.prompt > SHORT]
        first = found[0].optimum
        return {
            "proven": sum(one.optimum.status == "optimal" for one in found),
            "count": len(found),
            "preempting": _list(one.prompt for one in found if one.preemptions),
            "keeping": _list(one.prompt for one in found if not one.preemptions),
            "short": _above(short, "vllm+ef", "sarathi_pc+ef"),
            "long": _above(long, "vllm"),
            "near": max((one.above("vllm") for one in short), default=0.0),
            "near_free": max((one.above("vllm+ef") for one in long), default=0.0),
            "again": _by_itself(next((one for one in found if one.prompt in SHOWN), found[0])),
            "unit": first.unit,
            "rounding": max(one.optimum.rounding for one in found),
            "data": self._solved(),
            "gap": self.chart(
                "infermax-15-gap.png",
                "What the schedulers take, relative to the optimum",
                [[self._gaps()]],
                "I, tokens",
            ),
            "schedules": self.figure(
                "infermax-15-schedules.png",
                "Optimal schedules: requests by batches",
                partial(draw, [one for one in found if one.prompt in SHOWN] or found[:2]),
            ),
        }

    @cached_property
    def _instances(self) -> list[Instance]:
        scale = self.scale
        return solve_all(scale.optimum, scale.optimum_requests, self._time_limit, self._jobs)

    def _gaps(self) -> Panel:
        by_prompt = {one.prompt: one for one in self._instances}
        return panel(
            "latency over the optimum's",
            "ratio",
            PLAYED,
            list(by_prompt),
            lambda policy, i: by_prompt[i].policies[policy].latency / by_prompt[i].best.latency,
        )

    def _solved(self) -> str:
        rows = []
        for one in self._instances:
            assert one.optimum.objective is not None and one.optimum.bound is not None
            rows.append(
                [
                    f"{one.prompt}",
                    f"{one.kv_tokens}",
                    f"{one.optimum.objective * 1e3:.3f}",
                    f"{one.optimum.bound * 1e3:.3f}",
                    one.optimum.status,
                    f"{one.preemptions}",
                    f"{len(one.best.schedule)}",
                    *(f"{one.policies[name].latency * 1e3:.3f}" for name in PLAYED),
                ]
            )
        header = ["I", "M", "optimum, ms", "bound, ms", "status", "preemptions", "batches"]
        header += [f"{name}, ms" for name in PLAYED]
        return self.data("infermax-15-optimum.csv", header, rows)

    # Section 7: the Azure hour.

    def hour(self) -> dict[str, Any]:
        """What is said of it: every scheduler with M, and first the bound, `vllm` without a limit
        of memory."""

        def hour(policy: str, switches: Switches = (), kv_tokens: int = AZURE_M) -> InferMaxCase:
            return InferMaxCase(policy, self.azure, kv_tokens, self._count, AZURE_ON, switches)

        def of(policy: str, kv_tokens: int = AZURE_M, switches: Switches = ()) -> Numbers:
            return self.results[hour(policy, switches, kv_tokens)]

        free = [policy + EF for policy in PLAIN]
        found = {
            BOUND: of("vllm", UNLIMITED),
            **{policy: of(policy) for policy in (*PLAIN, *free)},
            **{label: of("infermax", switches=switches) for label, switches in INFERMAX.items()},
        }

        def times(*labels: str) -> str:
            return ", ".join(f"{found[label].latency:,.0f} s ({label})" for label in labels)

        plain, ours = [found[policy].latency for policy in PLAIN], found["infermax"].latency
        best = min(PLAIN, key=lambda policy: found[policy].latency)
        return {
            "trace": Path(self.azure).name,
            "requests": found[BOUND].requests,
            "tokens": found[BOUND].output_tokens,
            "plain": times(*PLAIN),
            "ours": times(*INFERMAX),
            "against": [ours / one - 1 for one in (min(plain), max(plain))],
            "bound": times(BOUND),
            "free": times(*free),
            "again": self.by_itself("latency", hour("infermax", INFERMAX["infermax"]), hour(best)),
            "figure": self.bars(
                "infermax-16-azure.png",
                "Sum of batch times, in seconds",
                {_broken(label): n.latency for label, n in found.items()},
                "sum of batch times, s",
            ),
        }


def _above(which: Iterable[Instance], *names: str) -> str:
    """By how much the best of these takes longer than the optimum."""
    return ", ".join(
        f"{min(one.above(name) for name in names):.1%} (I = {one.prompt})" for one in which
    )


def _by_itself(one: Instance) -> str:
    """The command that finds an instance's optimum."""
    assert one.optimum.objective is not None
    count = one.best.schedule.tokens.shape[1]
    return (
        f"One point by itself, I = {one.prompt}, `latency` "
        f"{one.optimum.objective * 1e3:.3f} ms (with the extra `optimal`):\n\n"
        f"    jaxserve optimal --workload=fixed:{one.prompt}x{count}x{count} "
        f"--kv_tokens={one.kv_tokens} --whole_prompts"
    )


def _broken(label: str) -> str:
    """Into the lines of a narrow column."""
    return label.replace("+", "\n+").replace(", ", ",\n")


def _list(values: Iterable[int]) -> str:
    return ", ".join(map(str, values)) or "none"


def _make(args: Namespace, known: Path | None) -> InferMax:
    if args.azure and not Path(args.azure).is_file():
        raise ValueError(f"--azure: there is no {args.azure}")
    if not args.azure and not args.run:
        print("no --azure=PATH: the seventh comparison is left out", file=sys.stderr)
    return InferMax(args, Results(run, lambda _: Numbers, known))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = flags("infermax", __doc__)
    add = parser.add_argument
    add("--azure", metavar="PATH", default="", help="Azure's conversation trace")
    add("--time_limit", type=float, default=300.0, help="seconds for one optimal schedule (300)")
    return write_page(parser, argv, _make)
