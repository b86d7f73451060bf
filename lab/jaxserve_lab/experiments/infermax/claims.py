"""Makes docs/infermax.md: what InferMax (arXiv 2411.07447) claims, and what the simulator says.

    python -m jaxserve_lab.experiments.infermax --azure=AzureLLMInferenceTrace_conv.csv

--azure is the hour of conversations of Azure's public dataset of 2023; without it the seventh
comparison is left out, and the page says so.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from jaxserve.command_line import Parser
from jaxserve.simulator.workloads.lengths import MIXES
from jaxserve_lab.experiments.claims.claim import (
    FACTOR,
    PERCENT,
    Claim,
    Places,
    Point,
    places,
)
from jaxserve_lab.experiments.claims.page import ClaimsPage, Shown
from jaxserve_lab.experiments.infermax import optimum
from jaxserve_lab.experiments.infermax.case import UNLIMITED, InferMaxCase, run

EF = "+ef"
PLAIN = ("vllm", "sarathi", "sarathi_pc")
LOW = (*PLAIN, "sarathi_nohy")
RANKED = ("rank_org", "rank_i", "rank_o")
FREE = "sarathi+ef"  # the same batches, and nothing computed twice
# As the authors' simulator has them: chunks may be as long as the batch, and a request that finds
# no memory does not block those behind it.
AUTHORS = (("full_prefill", True), ("probing", True))

AZURE_ON, AZURE_M = "llama-3-70b@4xa100", 100_000
BOUND = "vllm, M unlimited"
QUICK_AZURE = 200  # requests
PC = ("full_prefill", True)
INFERMAX: dict[str, tuple[tuple[str, bool | str], ...]] = {
    "infermax": (PC, ("expect", "candidate")),
    "infermax, sorting only": (PC, ("expect", "nothing")),
    "infermax, histogram only": (PC, ("expect", "candidate"), ("longest_first", False)),
    "infermax, reserve for all": (PC, ("expect", "running")),
    "infermax, P = 512": (("full_prefill", False), ("expect", "candidate")),
}

CLAIMS = (
    Claim("lowest", "the lowest", "latency", "vllm", "", "low, each", PERCENT),
    Claim("behind", "far behind", "latency", "sarathi_nohy", "vllm", "low, long"),
    Claim(
        "behind short", "far behind", "latency", "sarathi_nohy", "vllm", "low, short, end", FACTOR
    ),
    Claim("behind long", "far behind", "latency", "sarathi_nohy", "vllm", "low, long, end", FACTOR),
    Claim("latency short", "higher", "latency", "sarathi", "vllm", "low, short"),
    Claim("tpot short", "higher", "tpot", "sarathi", "vllm", "low, short"),
    Claim("tpot last", "lower", "tpot", "sarathi", "vllm", "low, short, end", FACTOR),
    Claim("latency long", "close", "latency", "sarathi", "vllm", "low, long", PERCENT),
    Claim("slower", "13.5%", "latency", "sarathi", "vllm", "high", PERCENT),
    Claim("faster", "", "latency", "vllm", "sarathi", "high", PERCENT),
    Claim("tpot", "5.3x", "tpot", "vllm", "sarathi", "high"),
    Claim("tpot p99", "5.3x", "tpot_p99", "vllm", "sarathi", "high"),
    Claim("tps", "nearly the highest", "tps", "sarathi_pc", PLAIN, "high", FACTOR),
    Claim("ttft", "higher", "ttft", "sarathi", "vllm", "high"),
    *(
        claim
        for policy, tps, ttft, tpot in (
            ("vllm", "17%", "1000x", "13x"),
            ("sarathi", "9.6%", "1.7x", "7.4x"),
            ("sarathi_pc", "13.8%", "1000x", "13x"),
        )
        for claim in (
            Claim(f"tps {policy}", tps, "tps", policy + EF, policy, "longest", PERCENT),
            Claim(f"ttft {policy}", ttft, "ttft", policy + EF, policy, "longest"),
            Claim(f"tpot {policy}", tpot, "tpot", policy, policy + EF, "longest"),
            Claim(f"tpot p99 {policy}", tpot, "tpot_p99", policy, policy + EF, "longest"),
        )
    ),
    *(
        Claim(f"M = {memory} {policy}", said, "tps", policy, policy + EF, f"M = {memory}", FACTOR)
        for memory, said in (
            (100, "TPS up to 1.9x / 2x higher with preemptions"),
            (1_000, "TPS up to 1.3x / 1.1x higher with preemptions"),
            (10_000, "TPS up to 1.5x lower with preemptions (measured on vLLM)"),
            (100_000, "TPS up to 1.2x lower with preemptions (measured on vLLM)"),
            (1_000_000, "hardly any preemptions"),
        )
        for policy in PLAIN[:2]
    ),
    *(
        Claim(f"{number} {by} {other}{way}", said, number, other, by, which + way)
        for number, by, which, (first, second), (said, also) in (
            ("latency", "rank_i", "all", ("rank_o", "rank_org"), ("1.3x", "1.3x")),
            ("ttft", "rank_i", "apart", ("rank_o", "rank_org"), ("3.1x", "2.3x")),
            ("tpot", "rank_i", "lilo", ("rank_o", "rank_org"), ("1.4x", "1.4x")),
            ("tpot", "rank_o", "no lilo", ("rank_i", "rank_org"), ("3.9x", "1.8x")),
        )
        for other, said in ((first, said), (second, also))
        for way in ("", ", probing")
    ),
    Claim("refills", "", "latency", "rank_i", FREE, "all"),
    Claim("hour", "6K s", "latency", "infermax", "", "hour", PERCENT),
)


class Scale:
    """How much is run."""

    prompts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # I
    outputs: Sequence[int] = (1, 32, 1024)  # O
    few, many = 32, 1024  # B at low and at high contention
    kv_tokens = 100_000  # M
    memories: Sequence[int] = (100, 1_000, 10_000, 100_000, 1_000_000)  # M where it is varied
    between: Sequence[int] = (3, 24, 48, 96, 140, 220, 305, 470, 700)  # more I there
    mixed: Sequence[int] = (16, 64, 256, 1024)  # B of the mixes
    optimum: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # I of the optimum
    optimum_requests = 4  # B and O there
    azure: int | None = None  # requests of the hour; None for all


class Quick(Scale):
    """Toy sizes."""

    prompts, outputs, few, many, kv_tokens = (1, 64), (1, 8), 4, 48, 20_000
    memories, between, mixed = (100, 1_000), (24,), (8, 16)
    optimum, optimum_requests, azure = (2, 64), 2, QUICK_AZURE


class InferMax(ClaimsPage):
    """What the template beside this asks for."""

    name, kind, run, rules = "infermax", InferMaxCase, run, "the rules `infermax_paper`"
    sizes, claims = (Scale, Quick), CLAIMS
    called: ClassVar = {mix: mix.upper() for mix in MIXES}
    held = (
        *(InferMaxCase(policy, "fixed:128x32x1024", 100_000) for policy in (*PLAIN, FREE)),
        *(InferMaxCase(policy, "lilo+siso", 100_000, 64) for policy in RANKED),
        InferMaxCase("infermax", "lilo+siso", 100_000, 64, switches=INFERMAX["infermax"]),
    )
    plain, free, low, ranked = PLAIN, tuple(policy + EF for policy in PLAIN), LOW, RANKED
    both = tuple(policy + way for policy in PLAIN for way in ("", EF))
    infermax, bound = tuple(INFERMAX), BOUND
    latency = Shown("latency", "latency, s", log_y=True)
    ttft, tpot = Shown("ttft", "TTFT, s", log_y=True), Shown("tpot", "TPOT, s", log_y=True)
    tps, tps_log = Shown("tps", "tokens/s"), Shown("tps", "tokens/s", log_y=True)
    preemptions = Shown("preemptions", "preemptions")

    def cases(self, policy: str, **at: Any) -> list[InferMaxCase]:
        """A policy's case: of a `mix`, of the Azure `hour` with so much memory, or of requests with
        `i` tokens in and `o` out, that arrive together. B is `many`, M `kv_tokens`."""
        scale = self.scale
        if hour := at.get("hour"):
            name, switches = policy.partition(",")[0], INFERMAX.get(policy, ())
            return [InferMaxCase(name, self.args.azure, hour, scale.azure, AZURE_ON, switches)]
        count, memory = at.get("many", scale.many), at.get("kv_tokens", scale.kv_tokens)
        if mix := at.get("mix"):
            switches = AUTHORS if at.get("probing") and policy != FREE else ()
            return [InferMaxCase(policy, mix, memory, count, switches=switches)]
        return [InferMaxCase(policy, f"fixed:{at['i']}x{at['o']}x{count}", memory)]

    @cached_property
    def where(self) -> dict[str, Places]:
        """At low contention all requests fit into M together; with varied M each of them does."""
        scale, few, inputs = self.scale, [self.scale.few], self.scale.prompts
        every, short, long = scale.outputs, scale.outputs[1:2], scale.outputs[-1:]
        by_input, grid = partial(places, "I = {i}"), partial(places, "I = {i}, O = {o}", i=inputs)
        mixes = {
            "all": MIXES,
            "lilo": [mix for mix in MIXES if "lilo" in mix],
            "no lilo": [mix for mix in MIXES if "lilo" not in mix],
            "apart": [mix for mix in MIXES if mix != "lilo+liso"],
        }

        def fitting(label: str, memories: Sequence[int]) -> Places:
            return places(label, kv_tokens=memories, i=self._fitting, o=short)

        def mixed(mixes: Sequence[str], **how: Any) -> Places:
            return places("{mix}, B = {many}", self.called, mix=mixes, many=scale.mixed, **how)

        return {
            "low": grid(o=every, many=few),
            "low, short": grid(o=short, many=few),
            "low, long": grid(o=long, many=few),
            "low, each": places("{theirs}, {i}, {o}", theirs=LOW[1:], i=inputs, o=every, many=few),
            "low, short, end": by_input(i=inputs[-4:], o=short, many=few),
            "low, long, end": by_input(i=inputs[-4:], o=long, many=few),
            "high": grid(o=every),
            **{f"O = {o}": by_input(i=inputs, o=[o]) for o in every},
            "longest": by_input(i=inputs, o=long),
            "memory": fitting("M = {kv_tokens}, I = {i}", scale.memories),
            **{f"M = {m}": fitting("I = {i}", [m]) for m in scale.memories},
            **{name: mixed(found) for name, found in mixes.items()},
            **{f"{name}, probing": mixed(found, probing=[True]) for name, found in mixes.items()},
            "hour": places("{theirs}", theirs=PLAIN, hour=[AZURE_M]),
        }

    def _fitting(self, at: Point) -> list[int]:
        """Values of I such that a whole request fits into M."""
        every = sorted({*self.scale.prompts, *self.scale.between})
        return [i for i in every if i + self.scale.outputs[1] - 1 <= at["kv_tokens"]]

    def optimal(self) -> dict[str, Any]:
        """What is said of it; nothing while simulations are missing, as it takes its time."""
        if not self.results.complete:
            return {}
        found = self._instances
        shown = [one for one in found if one.prompt in optimum.SHOWN] or found[:2]
        header = ["I", "M", "optimum, ms", "bound, ms", "status", "preemptions", "batches"]
        header += [f"{name}, ms" for name in optimum.POLICIES]
        caption = "What the schedulers take, relative to the optimum"
        panels = [[optimum.gaps(found)]]
        return {
            **optimum.said(found),
            "again": shown[0].by_itself(),
            "data": self.data("infermax-15-optimum.csv", header, [one.row() for one in found]),
            "gap": self.chart("infermax-15-gap.png", caption, panels, "I, tokens"),
            "schedules": self.figure(
                "infermax-15-schedules.png",
                "Optimal schedules: requests by batches",
                partial(optimum.draw, shown),
            ),
        }

    @cached_property
    def _instances(self) -> list[optimum.Instance]:
        scale, args = self.scale, self.args
        return optimum.solve_all(scale.optimum, scale.optimum_requests, args.time_limit, args.jobs)

    def seconds(self, policy: str) -> float:
        """Sum of the batch times of the Azure hour. policy: BOUND is without a limit of memory."""
        return self.value("latency", policy, {"hour": UNLIMITED if policy == BOUND else AZURE_M})

    def hours(self, *policies: str) -> str:
        """The same as in a sentence."""
        return ", ".join(f"{self.seconds(policy):,.0f} s ({policy})" for policy in policies)

    def by_policy(self) -> str:
        """A figure."""
        every = (BOUND, *PLAIN, *self.free, *INFERMAX)
        # Names are broken into the lines of a narrow column.
        bars = {n.replace("+", "\n+").replace(", ", ",\n"): self.seconds(n) for n in every}
        caption = "Sum of batch times, in seconds"
        return self.bars("infermax-16-azure.png", caption, bars, "sum of batch times, s")

    @property
    def trace(self) -> str:
        """The file of the Azure hour; "" without."""
        return Path(self.args.azure).name

    @classmethod
    def add_flags(cls, parser: Parser) -> None:
        """The trace, and how long to solve."""
        add = parser.add_argument
        add("--azure", metavar="PATH", default="", help="Azure's conversation trace")
        add(
            "--time_limit", type=float, default=300.0, help="seconds for one optimal schedule (300)"
        )

    @classmethod
    def made(cls, args: Namespace, known: Path | None) -> ClaimsPage:
        """As `ClaimsPage`. ValueError if the trace is missing."""
        if args.azure and not Path(args.azure).is_file():
            raise ValueError(f"--azure: there is no {args.azure}")
        if not args.azure and not args.run:
            print("no --azure=PATH: the seventh comparison is left out", file=sys.stderr)
        return super().made(args, known)
