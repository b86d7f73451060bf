"""What the schedule does to the distribution of latencies (Apt-Serve section 6.6, Figure 10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.apt_robust import FCFS, MODEL
from jaxserve.experiments.apt_setting import LABELS, PROJECTED, Part, percent, table
from jaxserve.experiments.claims import Row, Section
from jaxserve.experiments.figures import Panel, chart
from jaxserve.experiments.online import QUANTILES, OnlineCase, OnlineNumbers, OnlineResults

RATES = {"sharegpt": 6.0, "humaneval": 9.0, "longbench": 2.0}
DECAY = 0.4
DECAYED = f"aptserve, decay {DECAY:g}"
SWITCHES: dict[str, tuple[tuple[str, float], ...]] = {
    FCFS: (),
    PROJECTED: (),
    DECAYED: (("slo_decay", DECAY),),
}


class Latencies(Part):
    """6.6, Figure 10."""

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        for data in self.scale.data_sets:
            for system in SWITCHES:
                yield self.of(system, data)

    def of(self, system: str, data: str) -> OnlineCase:
        policy = FCFS if system == FCFS else PROJECTED
        switches = SWITCHES[system]
        return self.case(policy, MODEL, data, RATES[data], switches=switches, quantiles=True)

    def section(self, results: OnlineResults, figures: Path) -> Section:
        name = "aptserve-10-latencies.png"
        found = {
            (system, data): results[self.of(system, data)]
            for system in SWITCHES
            for data in self.scale.data_sets
        }
        panels = [
            [
                Panel(
                    f"{LABELS[data]}, {RATES[data]:g}/s",
                    f"share of requests, {what}",
                    {
                        system: (getattr(found[system, data], f"{what}_quantiles"), QUANTILES)
                        for system in SWITCHES
                    },
                    log_y=False,
                )
                for data in self.scale.data_sets
            ]
            for what in ("ttft", "tbt")
        ]
        chart(figures / name, panels, "seconds; below: TTFT above, P99 TBT of a request")
        return Section(
            "4. Latencies (section 6.6, Figure 10)",
            "OPT-13B, hidden caches projected. `slo_decay` is the share of its value that a "
            "request keeps while it misses its target; `aptserve`'s own is next to nothing.",
            self.rows(found),
            [(name, "Distributions of TTFT and of the requests' 99th percentiles of TBT")],
            [self.table(found)],
        )

    def rows(self, found: dict[tuple[str, str], OnlineNumbers]) -> list[Row]:
        def each(system: str) -> str:
            return ", ".join(
                f"{percent(found[system, data].attainment)}% ({LABELS[data]})"
                for data in self.scale.data_sets
            )

        tails = [
            (LABELS[data], found[DECAYED, data].ttft_p99, found[PROJECTED, data].ttft_p99)
            for data in self.scale.data_sets
        ]
        return [
            Row("`aptserve` attains over 90% at these rates", each(PROJECTED), OWN_TABLE),
            Row("first come, first served attains less than 30%", each(FCFS)),
            Row(
                f"decay {DECAY:g} shortens the tail much",
                "P99 of TTFT: "
                + ", ".join(f"{a:.3g} s for {b:.3g} s ({data})" for data, a, b in tails),
            ),
            Row(f"decay {DECAY:g} still attains more than FCFS", each(DECAYED)),
        ]

    def table(self, found: dict[tuple[str, str], OnlineNumbers]) -> str:
        rows = [
            [
                f"{LABELS[data]}, `{system}`",
                percent(n.attainment),
                percent(n.ttft_attainment),
                percent(n.tbt_attainment),
                f"{n.ttft_p50:.3g}",
                f"{n.ttft_p99:.3g}",
                f"{n.tbt_quantiles[QUANTILES.index(0.5)]:.3g}",
                f"{n.tbt_quantiles[QUANTILES.index(0.99)]:.3g}",
            ]
            for data in self.scale.data_sets
            for system in SWITCHES
            for n in [found[system, data]]
        ]
        return table(
            [
                "",
                "SLO, %",
                "TTFT, %",
                "TBT, %",
                "TTFT p50, s",
                "TTFT p99, s",
                "P99 TBT p50, s",
                "P99 TBT p99, s",
            ],
            rows,
        )


OWN_TABLE = "The paper's own Table 4 has 67.3% for ShareGPT at 6/s."
