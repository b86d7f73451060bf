"""Ranking requests by their lengths (InferMax section 4.6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.common.claims import (
    Comparison,
    Extreme,
    Get,
    Row,
    Section,
    latency_of,
    listed,
    tpot_of,
    ttft_of,
)
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.grid import Case, Results
from jaxserve.sched.workloads.lengths import MIXES

FREE = "sarathi+ef"  # the same batches, and nothing computed twice
# As the authors' simulator has them: chunks may be as long as the batch, and a request that finds
# no memory does not block those behind it.
AUTHORS = (("full_prefill", True), ("probing", True))


class Ranks(Comparison):
    """4.6, Figures 10 to 12."""

    policies = ("rank_org", "rank_i", "rank_o")

    def case(self, policy: str, mix: str, count: int, probing: bool = False) -> Case:
        """B = count requests of a mix, in an order that every policy gets. probing: as the authors
        run them."""
        switches = AUTHORS if probing and policy != FREE else ()
        return Case(policy, mix, self.scale.kv_tokens, count, switches=switches)

    def cases(self) -> Iterator[Case]:
        """Every mix and B, in each order, both ways, and, to compare with, under `sarathi+ef`."""
        for mix in MIXES:
            for count in self.scale.mixed:
                yield self.case(FREE, mix, count)
                for policy in self.policies:
                    yield self.case(policy, mix, count)
                    yield self.case(policy, mix, count, probing=True)

    def section(self, results: Results, figures: Path) -> Section:
        """Section 5 of the page: orders of service other than by arrival."""
        name = "infermax-10-ranks.png"
        self.draw(results, figures / name)
        return Section(
            "5. Ranking by input or output length (section 4.6, Figures 10 to 12)",
            f"The six mixes, B of {listed(self.scale.mixed)}, M = {self.scale.kv_tokens:,}, one "
            "shuffle each. *Probing*: as in the authors' simulator, P = C, and a request that "
            "finds no memory is passed over instead of blocking those behind it "
            "(`rank_i:full_prefill=true:probing=true`).",
            self.rows(results),
            [(name, "Latency, TTFT and TPOT against B, by mix")],
            [self.table(results)],
        )

    def rows(self, results: Results) -> list[Row]:
        """The claims of section 4.6: each the largest ratio over the mixes that it is about, and
        over B."""

        def ratio(
            get: Get, above: str, below: str, mixes: tuple[str, ...], probing: bool = False
        ) -> Extreme:
            return Extreme.of(
                {
                    f"{mix.upper()}, B = {count}": get(
                        results[self.case(above, mix, count, probing)]
                    )
                    / get(results[self.case(below, mix, count, probing)])
                    for mix in mixes
                    for count in self.scale.mixed
                }
            )

        def both(get: Get, by: str, others: tuple[str, str], mixes: tuple[str, ...]) -> str:
            def way(probing: bool) -> str:
                return " and ".join(
                    f"{ratio(get, other, by, mixes, probing).times()} than `{other}`"
                    for other in others
                )

            return f"{way(False)}; probing: up to {way(True)}"

        lilo = tuple(mix for mix in MIXES if "lilo" in mix)
        no_lilo = tuple(mix for mix in MIXES if "lilo" not in mix)
        apart = tuple(mix for mix in MIXES if mix != "lilo+liso")
        around = ("rank_o", "rank_org")
        rows = [
            Row(
                "`rank_i`: up to 1.3x lower latency, most with LILO+SISO",
                "up to "
                + both(latency_of, "rank_i", around, MIXES)
                + f"; `{FREE}` up to {ratio(latency_of, 'rank_i', FREE, MIXES).times()} lower than "
                "`rank_i`",
                LATENCY,
            ),
            Row(
                "`rank_i`: up to 3.1x and 2.3x lower TTFT than `rank_o` and `rank_org`, LILO+LISO "
                "apart",
                "up to " + both(ttft_of, "rank_i", around, apart),
            ),
            Row(
                "with LILO, `rank_i` has up to 1.4x smaller TPOT",
                "up to " + both(tpot_of, "rank_i", around, lilo),
            ),
            Row(
                "without LILO, `rank_o` has up to 3.9x and 1.8x smaller TPOT than `rank_i` and "
                "`rank_org`",
                "up to " + both(tpot_of, "rank_o", ("rank_i", "rank_org"), no_lilo),
                READING,
            ),
        ]
        return rows

    def draw(self, results: Results, path: Path) -> None:
        """Latency, TTFT and TPOT against B in rows, mixes in columns."""
        wanted: tuple[tuple[Get, str], ...] = (
            (latency_of, "latency, s"),
            (ttft_of, "TTFT, s"),
            (tpot_of, "TPOT, s"),
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
        chart(path, panels, "B, requests")

    def table(self, results: Results) -> str:
        """The largest B."""
        count = self.scale.mixed[-1]
        lines = [
            f"| B = {count} | scheduler | latency, s | TTFT, s | TPOT, s | preemptions "
            "| M in use |",
            "|---" * 7 + "|",
        ]
        ways = [
            *((policy, False, f"`{policy}`") for policy in self.policies),
            *((policy, True, f"`{policy}`, probing") for policy in self.policies),
            (FREE, False, f"`{FREE}`"),
        ]
        for mix in MIXES:
            for policy, probing, label in ways:
                n = results[self.case(policy, mix, count, probing)]
                lines.append(
                    f"| {mix.upper()} | {label} | {n.latency:.1f} | {n.ttft:.2f} | {n.tpot:.4f} "
                    f"| {n.preemptions:,} | {n.kv_used:.0%} |"
                )
        return "\n".join(lines)


LATENCY = (
    "Here the order changes who waits, hardly the total: M is full under every order (see the "
    "table), and `sarathi+ef`, which preempts nothing, shows how little there is to gain from "
    "fewer refills. The paper does not say on which scheduler its ranked ones build; ours is "
    "Sarathi, P = 512, with all phases in one order. The authors' way, probing, fills memory "
    "further and refills more, with TTFT and TPOT in the paper's proportions."
)
READING = (
    "See the first row. In the authors' simulator, besides, who is preempted may start again in "
    "the same batch."
)
