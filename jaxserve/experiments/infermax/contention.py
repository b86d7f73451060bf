"""Low and high contention (InferMax sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.common.claims import (
    TPOT,
    Comparison,
    Extreme,
    Get,
    Row,
    Section,
    latency_of,
    listed,
    preemptions_of,
    tpot_of,
    tpot_p99_of,
    ttft_of,
)
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.grid import Case, Results


class LowContention(Comparison):
    """4.2, Figure 4."""

    policies = ("vllm", "sarathi", "sarathi_pc", "sarathi_nohy")

    def case(self, policy: str, i: int, o: int) -> Case:
        """B is the scale's `few`, so that all requests fit into M at the same time."""
        return self.fixed(policy, i, o, self.scale.few)

    def cases(self) -> Iterator[Case]:
        """Every scheduler with every O and I."""
        for policy in self.policies:
            for o in self.scale.outputs:
                for i in self.scale.prompts:
                    yield self.case(policy, i, o)

    def section(self, results: Results, figures: Path) -> Section:
        """Section 1 of the page: all requests fit into M together."""
        scale = self.scale
        last = scale.prompts[-1]
        name = "infermax-4-low-contention.png"
        self.draw(results, figures / name)
        return Section(
            f"1. Low contention, B = {scale.few} (section 4.2, Figure 4)",
            f"I from {scale.prompts[0]} to {last}, O of {listed(scale.outputs)}, M = "
            f"{scale.kv_tokens:,}.",
            self.rows(results),
            [(name, "Latency, TTFT and TPOT against I, by O")],
            [],
        )

    def rows(self, results: Results) -> list[Row]:
        """The claims of section 4.2. Where O = 1 there is no TPOT, so no ratio of it either."""
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
        lost = max(
            value for p in self.policies[1:] for value in ratio(latency_of, "vllm", p).values()
        )
        last = scale.prompts[-1]
        tpot = ratio(tpot_of, "sarathi", "vllm", short)
        close = Extreme.of(ratio(latency_of, "sarathi", "vllm", long))
        preemptions = sum(results[case].preemptions for case in self.cases())
        rows = [
            Row("no preemptions", f"{preemptions} in {len(list(self.cases()))} runs"),
            Row(
                "`vllm` has the lowest latency throughout",
                f"its latency is at most {lost - 1:.1%} above another's",
            ),
            Row(
                "`sarathi_nohy` falls far behind as I grows",
                f"latency over `vllm`'s: {self.behind(results, short)}; "
                f"{self.behind(results, long)}",
                NOHY,
            ),
            Row(
                f"O = {short}: `sarathi` has the higher latency and TPOT",
                f"latency up to {Extreme.of(ratio(latency_of, 'sarathi', 'vllm', short)).times()}, "
                f"TPOT up to {Extreme.of(tpot).times()}",
            ),
            Row(
                f"O = {short}, I = {last}: `sarathi` has the lower TPOT",
                f"{tpot[f'I = {last}, O = {short}']:.2f}x `vllm`'s",
            ),
            Row(
                f"O = {long}: `sarathi` is close to `vllm`",
                f"latency at most {close.percent()}",
            ),
        ]
        return rows

    def behind(self, results: Results, o: int) -> str:
        """`sarathi_nohy` for the longest prompts."""
        steps = []
        for i in self.scale.prompts[-4:]:
            slow, fast = (results[self.case(p, i, o)].latency for p in ("sarathi_nohy", "vllm"))
            steps.append(f"{slow / fast:.2f}x (I = {i})")
        return f"{', '.join(steps)} at O = {o}"

    def draw(self, results: Results, path: Path) -> None:
        """Figure 4: a row each of latency, TTFT and TPOT, a column an O; no TPOT at O = 1."""
        scale = self.scale
        panels = [
            [
                self.panel(results, o, get, label) if o > 1 or get is not tpot_of else None
                for o in scale.outputs
            ]
            for get, label in (
                (latency_of, "latency, s"),
                (ttft_of, "TTFT, s"),
                (tpot_of, "TPOT, s"),
            )
        ]
        chart(path, panels, "I, tokens")

    def panel(self, results: Results, o: int, get: Get, label: str) -> Panel:
        """One number of all schedulers against I, for one O."""
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
        """Every scheduler with every O and I, B being the scale's `many`."""
        for policy in self.policies:
            for o in self.scale.outputs:
                for i in self.scale.prompts:
                    yield self.fixed(policy, i, o)

    def section(self, results: Results, figures: Path) -> Section:
        """Section 2 of the page: far more requests than fit into M together."""
        scale = self.scale
        name = "infermax-5-high-contention.png"
        self.draw(results, figures / name)
        return Section(
            f"2. High contention, B = {scale.many} (section 4.3, Figures 5 and 6)",
            f"I from {scale.prompts[0]} to {scale.prompts[-1]}, O of {listed(scale.outputs)}, M = "
            f"{scale.kv_tokens:,}.",
            self.rows(results),
            [(name, "Latency, TTFT, TPOT and preemptions against I, by O")],
            [],
        )

    def ratio(self, results: Results, get: Get, above: str, below: str) -> dict[str, float]:
        """One policy's number over another's, by I and O."""
        return {
            f"I = {i}, O = {o}": get(results[self.fixed(above, i, o)])
            / get(results[self.fixed(below, i, o)])
            for i in self.scale.prompts
            for o in self.scale.outputs
            if get(results[self.fixed(below, i, o)])
        }

    def rows(self, results: Results) -> list[Row]:
        """The claims of section 4.3; preemptions are summed over I."""
        scale = self.scale

        def ratio(get: Get, above: str, below: str) -> dict[str, float]:
            return self.ratio(results, get, above, below)

        slower = ratio(latency_of, "sarathi", "vllm")
        faster = Extreme.of(ratio(latency_of, "vllm", "sarathi"))
        best = sum(
            results[self.fixed("sarathi_pc", i, o)].tps
            >= 0.99 * max(results[self.fixed(p, i, o)].tps for p in self.policies)
            for i in scale.prompts
            for o in scale.outputs
        )
        preemptions = {
            policy: [
                sum(results[self.fixed(policy, i, o)].preemptions for i in scale.prompts)
                for o in scale.outputs
            ]
            for policy in self.policies
        }
        rows = [
            Row(
                "`sarathi` is up to 13.5% slower than `vllm`",
                f"up to {Extreme.of(slower).percent()}; elsewhere `vllm` is slower, by up to "
                f"{faster.percent()}",
                SLOWER,
            ),
            Row(
                "its TPOT is up to 5.3x lower",
                f"up to {Extreme.of(ratio(tpot_of, 'vllm', 'sarathi')).times()} "
                f"({Extreme.of(ratio(tpot_p99_of, 'vllm', 'sarathi')).times()} at p99)",
                TPOT,
            ),
            Row(
                "`sarathi_pc` has nearly the highest TPS for each O",
                f"within 1% of the highest in {best} of "
                f"{len(scale.prompts) * len(scale.outputs)} settings",
            ),
            Row(
                "preemptions rise with O",
                "; ".join(
                    f"`{policy}` "
                    + ", ".join(
                        f"{count:,} (O = {o})"
                        for o, count in zip(scale.outputs, counts, strict=True)
                    )
                    for policy, counts in preemptions.items()
                ),
            ),
            Row(
                "`vllm` and `sarathi_pc` have the lower TTFT, `sarathi` the lower TPOT",
                f"TTFT of `sarathi` up to {Extreme.of(ratio(ttft_of, 'sarathi', 'vllm')).times()} "
                "`vllm`'s",
            ),
        ]
        return rows

    def draw(self, results: Results, path: Path) -> None:
        """Latency, TTFT, TPOT and preemptions in rows, O in columns. At O = 1 there is no TPOT, and
        no request outgrows its prompt, so that none is preempted."""
        scale = self.scale
        wanted: tuple[tuple[Get, str], ...] = (
            (latency_of, "latency, s"),
            (ttft_of, "TTFT, s"),
            (tpot_of, "TPOT, s"),
            (preemptions_of, "preemptions"),
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
                    log_y=get is not preemptions_of,
                )
                if o > 1 or get not in (tpot_of, preemptions_of)
                else None
                for o in scale.outputs
            ]
            for get, label in wanted
        ]
        chart(path, panels, "I, tokens")


NOHY = (
    "A prefill batch holds C / I requests, and their decodes then run alone until all have ended. "
    "So it matters where B requests do not fit into one prefill batch, I > C / B."
)
SLOWER = (
    "`vllm` is the slower one where its early prefills fill the cache long before O is reached, "
    "and much is computed twice."
)
