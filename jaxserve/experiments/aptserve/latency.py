"""What the schedule does to the distribution of latencies (Apt-Serve section 6.6, Figure 10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.aptserve.robust import FCFS, MODEL
from jaxserve.experiments.aptserve.setting import LABELS, PROJECTED, Part
from jaxserve.experiments.common.claims import Row, Section, percent, table
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.online import QUANTILES, OnlineCase, OnlineNumbers, OnlineResults

RATES = {"sharegpt": 6.0, "humaneval": 9.0, "longbench": 2.0}
DECAY = 0.4
DECAYED = f"aptserve, decay {DECAY:g}"
SWITCHES: dict[str, tuple[tuple[str, float], ...]] = {
    FCFS: (),
    PROJECTED: (),
    DECAYED: (("slo_decay", DECAY),),
}


READS = {"projected": "", "absorbed": ", absorbed"}
Found = dict[tuple[str, str, str], OnlineNumbers]  # by system, data set and read


class Latencies(Part):
    """6.6, Figure 10."""

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """A trace for each of `settings`; one rate a data set, so there is nothing to search
        for."""
        for system, data, read in self.settings():
            yield self.of(system, data, read)

    def settings(self) -> Iterator[tuple[str, str, str]]:
        """System, data set, and how hidden caches are read."""
        for data in self.scale.data_sets:
            for read in READS:
                for system in SWITCHES:
                    yield system, data, read

    def of(self, system: str, data: str, read: str) -> OnlineCase:
        """With the quantiles of its latencies. read: a key of READS."""
        policy = (FCFS if system == FCFS else PROJECTED) + READS[read]
        switches = SWITCHES[system]
        return self.case(policy, MODEL, data, RATES[data], switches=switches, quantiles=True)

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 4 of the page: whom the schedule lets wait, and what decay changes."""
        name = "aptserve-10-latencies.png"
        found = {key: results[self.of(*key)] for key in self.settings()}
        self.draw(found, figures / name)
        return Section(
            "4. Latencies (section 6.6, Figure 10)",
            "OPT-13B. `slo_decay` is the share of its value that a request keeps while it misses "
            "its target; `aptserve`'s own is next to nothing.",
            self.rows(found),
            [(name, "Distributions of TTFT and of the requests' 99th percentiles of TBT")],
            [self.table(found)],
        )

    def draw(self, found: Found, path: Path) -> None:
        """Figure 10: share of requests against seconds, TTFT and P99 TBT in a row each for either
        way of reading hidden caches, data sets in columns."""
        panels = [
            [
                Panel(
                    f"{LABELS[data]}, {RATES[data]:g}/s, {read}",
                    f"share, {label}",
                    {
                        system: (getattr(found[system, data, read], quantiles), QUANTILES)
                        for system in SWITCHES
                    },
                    log_y=False,
                    markers=False,
                )
                for data in self.scale.data_sets
            ]
            for read in READS
            for label, quantiles in (("TTFT", "ttft_quantiles"), ("P99 TBT", "tbt_quantiles"))
        ]
        chart(path, panels, "seconds", dpi=95)

    def rows(self, found: Found) -> list[Row]:
        """The claims of section 6.6: attainment of the three systems, and what decay does to the
        99th percentile of TTFT."""

        def each(system: str) -> str:
            return "; ".join(
                f"{read} "
                + ", ".join(
                    f"{percent(found[system, data, read].attainment)}% ({LABELS[data]})"
                    for data in self.scale.data_sets
                )
                for read in READS
            )

        tails = "; ".join(
            f"{read} "
            + ", ".join(
                f"{found[DECAYED, data, read].ttft_p99:,.4g} s for "
                f"{found[PROJECTED, data, read].ttft_p99:,.4g} s ({LABELS[data]})"
                for data in self.scale.data_sets
            )
            for read in READS
        )
        return [
            Row("`aptserve` attains over 90% at these rates", each(PROJECTED), OWN_TABLE),
            Row("first come, first served attains less than 30%", each(FCFS), HUMANEVAL),
            Row(
                f"decay {DECAY:g} shortens the tail much", f"P99 of TTFT: {tails}", self.why(found)
            ),
            Row(f"decay {DECAY:g} still attains more than FCFS", each(DECAYED), "as above"),
        ]

    def why(self, found: Found) -> str:
        """Steps and hidden caches with and without decay."""
        data = self.scale.data_sets[0]

        def of(system: str, read: str) -> str:
            n = found[system, data, read]
            return f"{1e3 * n.step:.0f} ms a step, {n.hidden:.0%} of requests hidden"

        return (
            "A late request that keeps a share of its value keeps the share of a long wait, and "
            "soon outweighs those who could still be in time: the tail is shorter at the expense "
            "of attainment. Absorbed, it outweighs its penalty, too, and more caches are hidden "
            f"({LABELS[data]}: {of(DECAYED, 'absorbed')}; without decay "
            f"{of(PROJECTED, 'absorbed')}; projected {of(DECAYED, 'projected')})."
        )

    def table(self, found: Found) -> str:
        """A line a setting: attainment in percent, quantiles of TTFT and of P99 TBT in seconds."""
        rows = [
            [
                f"{LABELS[data]}, {read}, `{system}`",
                percent(n.attainment),
                percent(n.ttft_attainment),
                percent(n.tbt_attainment),
                f"{n.ttft_p50:,.4g}",
                f"{n.ttft_p99:,.4g}",
                f"{n.tbt_quantiles[QUANTILES.index(0.5)]:.3g}",
                f"{n.tbt_quantiles[QUANTILES.index(0.99)]:.3g}",
            ]
            for (system, data, read), n in found.items()
        ]
        header = ["", "SLO, %", "TTFT, %", "TBT, %", "TTFT p50, s", "p99, s", "P99 TBT p50, s"]
        return table([*header, "p99, s"], rows)


OWN_TABLE = "The paper's own Table 4 has 67.3% for ShareGPT at 6/s."
HUMANEVAL = (
    "Our HumanEval requests, the 164 problems at four characters a token, leave memory to spare at "
    "9/s. The paper itself takes 9/s for Figure 9 because Apt-Serve and Sarathi are close there."
)
