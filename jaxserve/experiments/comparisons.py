"""The paper's claims about fixed and mixed workloads (InferMax sections 4.2 to 4.6), and what the
simulator says to each. `infermax.py` runs them and writes the page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.experiments.figures import Panel, chart
from jaxserve.experiments.grid import Case, Numbers, Results
from jaxserve.sched.lengths import MIXES

EF = "+ef"
Get = Callable[[Numbers], float]


@dataclass(frozen=True)
class Scale:
    """How much is run. prompts: I; requests: B of the two contention levels."""

    prompts: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 512, 1024)
    outputs: tuple[int, ...] = (1, 32, 1024)
    few: int = 32
    many: int = 1024
    kv_tokens: int = 100_000
    memories: tuple[int, ...] = (100, 1_000, 10_000, 100_000, 1_000_000)
    mixed: tuple[int, ...] = (16, 64, 256, 1024)
    optimum: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    optimum_requests: int = 4


QUICK = Scale((1, 64), (1, 8), 4, 48, 20_000, (100, 1_000), (8, 16), (2, 64), 2)


@dataclass(frozen=True)
class Row:
    """What the paper says, what came out here, and why the two differ, if they do."""

    claim: str
    ours: str
    why: str = ""


@dataclass(frozen=True)
class Section:
    """figures: file name and caption. notes: paragraphs beneath the table."""

    title: str
    setting: str
    rows: list[Row]
    figures: list[tuple[str, str]]
    notes: list[str]


class Comparison(ABC):
    """One of the seven."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def cases(self) -> Iterator[Case]: ...

    @abstractmethod
    def section(self, results: Results, figures: Path) -> Section: ...

    def fixed(self, policy: str, i: int, o: int, requests: int = 0, kv_tokens: int = 0) -> Case:
        count = requests or self.scale.many
        return Case(policy, f"fixed:{i}x{o}x{count}", kv_tokens or self.scale.kv_tokens)


@dataclass(frozen=True)
class Extreme:
    """The largest of some values, and where it was."""

    value: float
    where: str

    @classmethod
    def of(cls, values: dict[str, float]) -> Extreme:
        where = max(values, key=lambda key: values[key])
        return cls(values[where], where)

    def times(self) -> str:
        return f"{self.value:.3g}x ({self.where})"

    def percent(self) -> str:
        return f"{self.value - 1:+.1%} ({self.where})"


class LowContention(Comparison):
    """4.2, Figure 4."""

    policies = ("vllm", "sarathi", "sarathi_pc", "sarathi_nohy")

    def case(self, policy: str, i: int, o: int) -> Case:
        return self.fixed(policy, i, o, self.scale.few)

    def cases(self) -> Iterator[Case]:
        for policy in self.policies:
            for o in self.scale.outputs:
                for i in self.scale.prompts:
                    yield self.case(policy, i, o)

    def section(self, results: Results, figures: Path) -> Section:
        scale = self.scale
        cells = [(i, o) for i in scale.prompts for o in scale.outputs]

        def ratio(get: Get, above: str, below: str, o: int | None = None) -> dict[str, float]:
            return {
                f"I = {i}, O = {out}": get(results[self.case(above, i, out)])
                / get(results[self.case(below, i, out)])
                for i, out in cells
                if out in (o, *([] if o else [out])) and get(results[self.case(below, i, out)])
            }

        short, long = scale.outputs[1], scale.outputs[-1]
        behind = [
            results[self.case("sarathi_nohy", i, short)].latency
            / results[self.case("vllm", i, short)].latency
            for i in scale.prompts
        ]
        others = {
            f"{policy}, {where}": value
            for policy in self.policies[1:]
            for where, value in ratio(_latency, "vllm", policy).items()
        }
        lost = Extreme.of(others)
        last = scale.prompts[-1]
        tpot = ratio(_tpot, "sarathi", "vllm", short)
        evictions = sum(results[case].evictions for case in self.cases())
        rows = [
            Row(
                "no evictions",
                f"{evictions} in {len(list(self.cases()))} runs",
            ),
            Row(
                "`vllm` has the lowest latency throughout",
                f"its latency is at most {lost.value - 1:.1%} above another's ({lost.where})",
                "Where `vllm` is behind, it is `sarathi_pc`, which puts the last prefills and the "
                "first decodes into one batch and saves a batch's fixed time; the paper counts it "
                "into the same group.",
            ),
            Row(
                "`sarathi_nohy` falls far behind as I grows",
                f"latency over `vllm`'s at O = {short}: "
                + ", ".join(
                    f"{value:.2f}x (I = {i})"
                    for i, value in zip(scale.prompts, behind, strict=True)
                ),
            ),
            Row(
                f"O = {short}: `sarathi` has the higher latency and TPOT",
                f"latency up to {Extreme.of(ratio(_latency, 'sarathi', 'vllm', short)).times()}, "
                f"TPOT up to {Extreme.of(tpot).times()}",
            ),
            Row(
                f"O = {short}, I = {last}: `sarathi` has the lower TPOT",
                f"{tpot[f'I = {last}, O = {short}']:.2f}x `vllm`'s",
            ),
            Row(
                f"O = {long}: `sarathi` is close to `vllm`",
                f"latency at most {Extreme.of(ratio(_latency, 'sarathi', 'vllm', long)).percent()}",
            ),
        ]
        name = "infermax-4-low-contention.png"
        panels = [
            [
                self.panel(results, o, get, label) if o > 1 or get is not _tpot else None
                for o in scale.outputs
            ]
            for get, label in ((_latency, "latency, s"), (_ttft, "TTFT, s"), (_tpot, "TPOT, s"))
        ]
        chart(figures / name, panels, "I, tokens")
        return Section(
            f"1. Low contention, B = {scale.few} (section 4.2, Figure 4)",
            f"I from {scale.prompts[0]} to {last}, O of {_list(scale.outputs)}, M = "
            f"{scale.kv_tokens:,}.",
            rows,
            [(name, "Latency, TTFT and TPOT against I, by O")],
            [],
        )

    def panel(self, results: Results, o: int, get: Get, label: str) -> Panel:
        lines = {
            policy: (
                self.scale.prompts,
                [get(results[self.case(policy, i, o)]) for i in self.scale.prompts],
            )
            for policy in self.policies
        }
        return Panel(f"O = {o}", label, lines)


class HighContention(Comparison):
    """4.3, Figures 5 and 6."""

    policies = ("vllm", "sarathi", "sarathi_pc")

    def cases(self) -> Iterator[Case]:
        for policy in self.policies:
            for o in self.scale.outputs:
                for i in self.scale.prompts:
                    yield self.fixed(policy, i, o)

    def section(self, results: Results, figures: Path) -> Section:
        scale = self.scale

        def ratio(get: Get, above: str, below: str) -> dict[str, float]:
            return {
                f"I = {i}, O = {o}": get(results[self.fixed(above, i, o)])
                / get(results[self.fixed(below, i, o)])
                for i in scale.prompts
                for o in scale.outputs
                if get(results[self.fixed(below, i, o)])
            }

        slower = ratio(_latency, "sarathi", "vllm")
        faster = Extreme.of(ratio(_latency, "vllm", "sarathi"))
        best = sum(
            results[self.fixed("sarathi_pc", i, o)].tps
            >= 0.99 * max(results[self.fixed(p, i, o)].tps for p in self.policies)
            for i in scale.prompts
            for o in scale.outputs
        )
        evictions = {
            policy: [
                sum(results[self.fixed(policy, i, o)].evictions for i in scale.prompts)
                for o in scale.outputs
            ]
            for policy in self.policies
        }
        rows = [
            Row(
                "`sarathi` is up to 13.5% slower than `vllm`",
                f"up to {Extreme.of(slower).percent()}; where `vllm` evicts most, `sarathi` is the "
                f"faster one, by up to {faster.percent()}",
                WHY_SLOWER,
            ),
            Row(
                "its TPOT is up to 5.3x lower",
                f"up to {Extreme.of(ratio(_tpot, 'vllm', 'sarathi')).times()} lower",
                WHY_TPOT,
            ),
            Row(
                "`sarathi_pc` has nearly the highest TPS for each O",
                f"within 1% of the highest in {best} of "
                f"{len(scale.prompts) * len(scale.outputs)} settings",
            ),
            Row(
                "evictions rise with O",
                "; ".join(
                    f"`{policy}` "
                    + ", ".join(
                        f"{count:,} (O = {o})"
                        for o, count in zip(scale.outputs, counts, strict=True)
                    )
                    for policy, counts in evictions.items()
                ),
            ),
            Row(
                "`vllm` and `sarathi_pc` have the lower TTFT, `sarathi` the lower TPOT",
                f"TTFT of `sarathi` up to {Extreme.of(ratio(_ttft, 'sarathi', 'vllm')).times()} "
                "`vllm`'s",
            ),
        ]
        name = "infermax-5-high-contention.png"
        wanted: tuple[tuple[Get, str], ...] = (
            (_latency, "latency, s"),
            (_ttft, "TTFT, s"),
            (_tpot, "TPOT, s"),
            (_evictions, "evictions"),
        )
        panels = [
            [
                Panel(
                    f"O = {o}",
                    label,
                    {
                        p: (
                            scale.prompts,
                            [get(results[self.fixed(p, i, o)]) for i in scale.prompts],
                        )
                        for p in self.policies
                    },
                    log_y=get is not _evictions,
                )
                if o > 1 or get not in (_tpot, _evictions)
                else None
                for o in scale.outputs
            ]
            for get, label in wanted
        ]
        chart(figures / name, panels, "I, tokens")
        return Section(
            f"2. High contention, B = {scale.many} (section 4.3, Figures 5 and 6)",
            f"I from {scale.prompts[0]} to {scale.prompts[-1]}, O of {_list(scale.outputs)}, M = "
            f"{scale.kv_tokens:,}.",
            rows,
            [(name, "Latency, TTFT, TPOT and evictions against I, by O")],
            [],
        )


class EvictionFree(Comparison):
    """4.4, Figure 8."""

    policies = ("vllm", "sarathi", "sarathi_pc")
    claims = ("17%", "9.6%", "13.8%")

    def cases(self) -> Iterator[Case]:
        for policy in self.policies:
            for i in self.scale.prompts:
                for variant in ("", EF):
                    yield self.fixed(policy + variant, i, self.scale.outputs[-1])

    def section(self, results: Results, figures: Path) -> Section:
        scale = self.scale
        o = scale.outputs[-1]

        def ratio(get: Get, above: str, below: str) -> dict[str, float]:
            return {
                f"I = {i}": get(results[self.fixed(above, i, o)])
                / get(results[self.fixed(below, i, o)])
                for i in scale.prompts
            }

        rows = []
        for policy, claim in zip(self.policies, self.claims, strict=True):
            tps = ratio(_tps, policy + EF, policy)
            least = Extreme.of(ratio(_tps, policy, policy + EF))
            rows.append(
                Row(
                    f"`{policy}+ef`: TPS up to {claim} better",
                    f"up to {Extreme.of(tps).percent()}; worst {1 / least.value - 1:+.1%} "
                    f"({least.where})",
                    WHY_EF.get(policy, ""),
                )
            )
        for policy, claim in zip(self.policies, ("1000x", "1.7x", "1000x"), strict=True):
            ttft = Extreme.of(ratio(_ttft, policy + EF, policy))
            rows.append(Row(f"TTFT of `{policy}+ef` up to {claim} higher", ttft.times()))
        for policy, claim in zip(self.policies, ("13x", "7.4x", "13x"), strict=True):
            tpot = Extreme.of(ratio(_tpot, policy, policy + EF))
            rows.append(Row(f"TPOT of `{policy}+ef` up to {claim} lower", tpot.times()))
        ends = (scale.prompts[0], scale.prompts[-1])
        rows.append(
            Row(
                "the running size of the eviction-free ones is about M / (I + O)",
                "mean batch of `vllm+ef`: "
                + ", ".join(
                    f"{results[self.fixed('vllm+ef', i, o)].batch_size:.0f} at I = {i} "
                    f"(M / (I + O) = {scale.kv_tokens / (i + o):.0f})"
                    for i in ends
                ),
            )
        )
        name = "infermax-8-eviction-free.png"
        wanted: tuple[tuple[Get, str], ...] = (
            (_tps, "tokens/s"),
            (_ttft, "TTFT, s"),
            (_tpot, "TPOT, s"),
        )
        panels = [
            [
                Panel(
                    label,
                    label,
                    {
                        p + v: (
                            scale.prompts,
                            [get(results[self.fixed(p + v, i, o)]) for i in scale.prompts],
                        )
                        for p in self.policies
                        for v in ("", EF)
                    },
                    log_y=get is not _tps,
                )
                for get, label in wanted
            ]
        ]
        chart(figures / name, panels, "I, tokens")
        return Section(
            f"3. Eviction-free, O = {o}, B = {scale.many} (section 4.4, Figure 8)",
            "`+ef` reserves I + O - 1 tokens when a request starts, so it knows O.",
            rows,
            [(name, "Eviction-free schedulers (dashed) and their originals against I")],
            [],
        )


class MemorySize(Comparison):
    """4.5, Figure 9."""

    policies = ("vllm", "sarathi")

    def prompts(self, memory: int) -> list[int]:
        return [i for i in self.scale.prompts if i + self.scale.outputs[1] - 1 <= memory]

    def cases(self) -> Iterator[Case]:
        for memory in self.scale.memories:
            for i in self.prompts(memory):
                for policy in self.policies:
                    for variant in ("", EF):
                        yield self.case(policy + variant, i, memory)

    def case(self, policy: str, i: int, memory: int) -> Case:
        return self.fixed(policy, i, self.scale.outputs[1], kv_tokens=memory)

    def section(self, results: Results, figures: Path) -> Section:
        scale = self.scale
        rows = []
        claims = {
            100: "up to 1.9x / 2x higher with evictions",
            1_000: "up to 1.3x / 1.1x higher with evictions",
            10_000: "up to 1.5x lower with evictions (measured on vLLM)",
            100_000: "up to 1.2x lower with evictions (measured on vLLM)",
            1_000_000: "hardly any evictions",
        }
        for memory in scale.memories:
            parts = []
            for policy in self.policies:
                gain = {
                    f"I = {i}": results[self.case(policy, i, memory)].tps
                    / results[self.case(policy + EF, i, memory)].tps
                    for i in self.prompts(memory)
                }
                most, least = Extreme.of(gain), Extreme.of({k: -v for k, v in gain.items()})
                parts.append(
                    f"`{policy}` {-least.value:.2f}x ({least.where}) to {most.value:.2f}x "
                    f"({most.where})"
                )
            rows.append(
                Row(
                    f"M = {memory:,}: TPS {claims.get(memory, '')}",
                    "TPS over that of `+ef`: " + "; ".join(parts),
                    WHY_MEMORY.get(memory, ""),
                )
            )
        largest = scale.memories[-1]
        used = max(results[self.case("sarathi", i, largest)].kv_used for i in self.prompts(largest))
        rows.append(
            Row(
                f"M = {largest:,}: `sarathi` uses less than 20% of it",
                f"{used:.1%} on average where it uses most",
            )
        )
        name = "infermax-9-memory.png"
        wanted: tuple[tuple[Get, str], ...] = ((_tps, "tokens/s"), (_tpot, "TPOT, s"))
        panels = [
            [
                Panel(
                    f"M = {memory:,}",
                    label,
                    {
                        p + v: (
                            self.prompts(memory),
                            [
                                get(results[self.case(p + v, i, memory)])
                                for i in self.prompts(memory)
                            ],
                        )
                        for p in self.policies
                        for v in ("", EF)
                    },
                )
                for memory in scale.memories
            ]
            for get, label in wanted
        ]
        chart(figures / name, panels, "I, tokens")
        return Section(
            f"4. M from {scale.memories[0]:,} to {largest:,}, O = {scale.outputs[1]} "
            "(section 4.5, Figure 9)",
            f"B = {scale.many}; every I whose requests fit into M.",
            rows,
            [(name, "TPS and TPOT against I, by M; eviction-free ones dashed")],
            [],
        )


class Ranks(Comparison):
    """4.6, Figures 10 to 12."""

    policies = ("rank_org", "rank_i", "rank_o")

    def case(self, policy: str, mix: str, count: int) -> Case:
        return Case(policy, mix, self.scale.kv_tokens, count)

    def cases(self) -> Iterator[Case]:
        for mix in MIXES:
            for count in self.scale.mixed:
                for policy in self.policies:
                    yield self.case(policy, mix, count)

    def section(self, results: Results, figures: Path) -> Section:
        def ratio(get: Get, above: str, below: str, mixes: tuple[str, ...]) -> Extreme:
            return Extreme.of(
                {
                    f"{mix.upper()}, B = {count}": get(results[self.case(above, mix, count)])
                    / get(results[self.case(below, mix, count)])
                    for mix in mixes
                    for count in self.scale.mixed
                }
            )

        def both(get: Get, by: str, others: tuple[str, str], mixes: tuple[str, ...]) -> str:
            found = [f"{ratio(get, other, by, mixes).times()} than `{other}`" for other in others]
            return " and ".join(found)

        lilo = tuple(mix for mix in MIXES if "lilo" in mix)
        no_lilo = tuple(mix for mix in MIXES if "lilo" not in mix)
        apart = tuple(mix for mix in MIXES if mix != "lilo+liso")
        around = ("rank_o", "rank_org")
        rows = [
            Row(
                "`rank_i`: up to 1.3x lower latency, most with LILO+SISO",
                "up to " + both(_latency, "rank_i", around, MIXES),
                WHY_RANK["latency"],
            ),
            Row(
                "`rank_i`: up to 3.1x and 2.3x lower TTFT than `rank_o` and `rank_org`, LILO+LISO "
                "apart",
                "up to " + both(_ttft, "rank_i", around, apart),
                WHY_RANK["ttft"],
            ),
            Row(
                "with LILO, `rank_i` has up to 1.4x smaller TPOT",
                "up to " + both(_tpot, "rank_i", around, lilo),
                WHY_RANK["tpot"],
            ),
            Row(
                "without LILO, `rank_o` has up to 3.9x and 1.8x smaller TPOT than `rank_i` and "
                "`rank_org`",
                "up to " + both(_tpot, "rank_o", ("rank_i", "rank_org"), no_lilo),
                WHY_RANK["no_lilo"],
            ),
        ]
        name = "infermax-10-ranks.png"
        wanted: tuple[tuple[Get, str], ...] = (
            (_latency, "latency, s"),
            (_ttft, "TTFT, s"),
            (_tpot, "TPOT, s"),
        )
        panels = [
            [
                Panel(
                    mix.upper(),
                    label,
                    {
                        p: (
                            self.scale.mixed,
                            [get(results[self.case(p, mix, n)]) for n in self.scale.mixed],
                        )
                        for p in self.policies
                    },
                )
                for mix in MIXES
            ]
            for get, label in wanted
        ]
        chart(figures / name, panels, "B, requests")
        return Section(
            "5. Ranking by input or output length (section 4.6, Figures 10 to 12)",
            f"The six mixes, B of {_list(self.scale.mixed)}, M = {self.scale.kv_tokens:,}, one "
            "shuffle each.",
            rows,
            [(name, "Latency, TTFT and TPOT against B, by mix")],
            [],
        )


def _latency(n: Numbers) -> float:
    return n.latency


def _tps(n: Numbers) -> float:
    return n.tps


def _ttft(n: Numbers) -> float:
    return n.ttft


def _tpot(n: Numbers) -> float:
    return n.tpot


def _evictions(n: Numbers) -> float:
    return n.evictions


def _list(values: tuple[int, ...]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}" if first else last


WHY_SLOWER = ""
WHY_TPOT = ""
WHY_EF: dict[str, str] = {}
WHY_MEMORY: dict[int, str] = {}
WHY_RANK = {"latency": "", "ttft": "", "tpot": "", "no_lilo": ""}
