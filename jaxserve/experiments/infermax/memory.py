"""Preemptions and the size of the cache (InferMax sections 4.4 and 4.5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.common.claims import (
    EF,
    TPOT,
    Comparison,
    Extreme,
    Get,
    Row,
    Section,
    tpot_of,
    tpot_p99_of,
    tps_of,
    ttft_of,
)
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.grid import Case, Results


class EvictionFree(Comparison):
    """4.4, Figure 8."""

    policies = ("vllm", "sarathi", "sarathi_pc")
    claims = ("17%", "9.6%", "13.8%")

    def cases(self) -> Iterator[Case]:
        """Every scheduler, with and without `+ef`, with every I and the largest O."""
        for policy in self.policies:
            for i in self.scale.prompts:
                for variant in ("", EF):
                    yield self.fixed(policy + variant, i, self.scale.outputs[-1])

    def section(self, results: Results, figures: Path) -> Section:
        """Section 3 of the page: what it brings to preempt nobody, knowing O."""
        scale = self.scale
        o = scale.outputs[-1]
        name = "infermax-8-eviction-free.png"
        self.draw(results, figures / name)
        return Section(
            f"3. Eviction-free, O = {o}, B = {scale.many} (section 4.4, Figure 8)",
            "`+ef` reserves I + O - 1 tokens when a request starts, so it knows O.",
            self.rows(results),
            [(name, "Eviction-free schedulers (dashed) and their originals against I")],
            [],
        )

    def rows(self, results: Results) -> list[Row]:
        """The claims of section 4.4: what reserving whole requests does to TPS, TTFT and TPOT, by
        scheduler, and how many requests then run at once."""
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
            tps = ratio(tps_of, policy + EF, policy)
            least = Extreme.of(ratio(tps_of, policy, policy + EF))
            rows.append(
                Row(
                    f"`{policy}+ef`: TPS up to {claim} better",
                    f"up to {Extreme.of(tps).percent()}; worst {1 / least.value - 1:+.1%} "
                    f"({least.where})",
                )
            )
        for policy, claim in zip(self.policies, ("1000x", "1.7x", "1000x"), strict=True):
            ttft = Extreme.of(ratio(ttft_of, policy + EF, policy))
            rows.append(Row(f"TTFT of `{policy}+ef` up to {claim} higher", ttft.times()))
        for policy, claim in zip(self.policies, ("13x", "7.4x", "13x"), strict=True):
            tpot = Extreme.of(ratio(tpot_of, policy, policy + EF)).times()
            p99 = Extreme.of(ratio(tpot_p99_of, policy, policy + EF)).times()
            why = TPOT if policy == "vllm" else "as above"
            rows.append(
                Row(f"TPOT of `{policy}+ef` up to {claim} lower", f"{tpot} ({p99} at p99)", why)
            )
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
        return rows

    def draw(self, results: Results, path: Path) -> None:
        """Figure 8: TPS, TTFT and TPOT side by side."""
        scale = self.scale
        o = scale.outputs[-1]
        wanted: tuple[tuple[Get, str], ...] = (
            (tps_of, "tokens/s"),
            (ttft_of, "TTFT, s"),
            (tpot_of, "TPOT, s"),
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
                    log_y=get is not tps_of,
                )
                for get, label in wanted
            ]
        ]
        chart(path, panels, "I, tokens")


class MemorySize(Comparison):
    """4.5, Figure 9."""

    policies = ("vllm", "sarathi")

    def prompts(self, memory: int) -> list[int]:
        """Each I with which a whole request, I + O - 1 tokens, fits into M = memory tokens;
        ascending."""
        every = sorted({*self.scale.prompts, *self.scale.between})
        return [i for i in every if i + self.scale.outputs[1] - 1 <= memory]

    def cases(self) -> Iterator[Case]:
        """Both schedulers, with and without `+ef`, with every M and what `prompts` has for it."""
        for memory in self.scale.memories:
            for i in self.prompts(memory):
                for policy in self.policies:
                    for variant in ("", EF):
                        yield self.case(policy + variant, i, memory)

    def case(self, policy: str, i: int, memory: int) -> Case:
        """O is the second of the scale's; memory is M, tokens."""
        return self.fixed(policy, i, self.scale.outputs[1], kv_tokens=memory)

    def section(self, results: Results, figures: Path) -> Section:
        """Section 4 of the page: with which M preempting pays."""
        scale = self.scale
        largest = scale.memories[-1]
        name = "infermax-9-memory.png"
        self.draw(results, figures / name)
        return Section(
            f"4. M from {scale.memories[0]:,} to {largest:,}, O = {scale.outputs[1]} "
            "(section 4.5, Figure 9)",
            f"B = {scale.many}; every I whose requests fit into M, some of them no powers of two.",
            self.rows(results),
            [(name, "TPS and TPOT against I, by M; eviction-free ones dashed")],
            [],
        )

    def rows(self, results: Results) -> list[Row]:
        """The claims of section 4.5: for each M the range of TPS with preemptions over TPS without,
        and the mean share of the largest M that `sarathi` uses."""
        scale = self.scale
        rows = []
        claims = {
            100: "TPS up to 1.9x / 2x higher with preemptions",
            1_000: "TPS up to 1.3x / 1.1x higher with preemptions",
            10_000: "TPS up to 1.5x lower with preemptions (measured on vLLM)",
            100_000: "TPS up to 1.2x lower with preemptions (measured on vLLM)",
            1_000_000: "hardly any preemptions",
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
                    f"M = {memory:,}: {claims.get(memory, '')}",
                    "TPS over that of `+ef`: " + "; ".join(parts),
                    WHY.get(memory, ""),
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
        return rows

    def draw(self, results: Results, path: Path) -> None:
        """Figure 9: TPS above TPOT, a column an M."""
        scale = self.scale
        wanted: tuple[tuple[Get, str], ...] = ((tps_of, "tokens/s"), (tpot_of, "TPOT, s"))
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
        chart(path, panels, "I, tokens")


WHY = {
    100: "Highest where M / I and M / (I + O) round to different numbers of requests.",
    1_000: (
        "As above: at I = 470 two prompts fit, but one whole request. At the powers of two there "
        "is next to nothing to gain: the eviction-free schedulers know the exact lengths, pack as "
        "many requests and compute nothing twice."
    ),
}
