"""Burstiness, and what each of Apt-Serve's two ideas brings (sections 6.4 and 6.5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.aptserve.setting import ABSORBED, LABELS, PROJECTED, Part
from jaxserve.experiments.common.claims import Extreme, Row, Section, percent, table
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.online import (
    OnlineCase,
    OnlineNumbers,
    OnlineResults,
    place_of,
    workload_of,
)

MODEL = "13B"
RATES = {"sharegpt": 3.8, "humaneval": 9.0, "longbench": 1.5}
KV, FCFS, FCFS_ABSORBED = "aptserve_kv", "aptserve_fcfs", "aptserve_fcfs, absorbed"
TABLES = {
    # data set, rate, CV: Table 4's K and V only, the hybrid cache, and Table 5's FCFS, percent
    ("sharegpt", 3.0, 1): (99.5, 99.5, 26.4),
    ("sharegpt", 3.0, 5): (94.7, 95.9, 59.7),
    ("sharegpt", 3.0, 10): (75.1, 78.2, 11.9),
    ("sharegpt", 6.0, 1): (65.7, 67.3, 20.0),
    ("sharegpt", 6.0, 5): (66.7, 67.7, 18.1),
    ("sharegpt", 6.0, 10): (57.1, 58.4, 9.9),
    ("longbench", 1.5, 1): (96.6, 98.2, 11.8),
    ("longbench", 1.5, 5): (70.0, 76.0, 10.8),
    ("longbench", 1.5, 10): (43.4, 50.8, 5.4),
    ("longbench", 3.0, 1): (70.0, 77.6, 4.8),
    ("longbench", 3.0, 5): (58.8, 64.8, 4.6),
    ("longbench", 3.0, 10): (35.6, 42.5, 4.2),
}


class Bursts(Part):
    """6.4, Figure 9."""

    systems = ("vllm", "sarathi", PROJECTED, ABSORBED)

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """Every system with every data set and CV, at the data set's one rate."""
        for data in self.scale.data_sets:
            for cv in self.scale.cvs:
                for system in self.systems:
                    yield self.burst(system, data, cv)

    def burst(self, system: str, data: str, cv: float) -> OnlineCase:
        """cv: of the gaps between arrivals, standard deviation over mean; 1 is Poisson."""
        return self.case(system, MODEL, data, RATES[data], cv=cv)

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 2 of the page: attainment against the CV of the gaps."""
        name = "aptserve-9-bursts.png"
        panels = [
            Panel(
                f"{LABELS[data]}, {RATES[data]:g}/s",
                "SLO attainment",
                {
                    system: (
                        self.scale.cvs,
                        [results[self.burst(system, data, cv)].attainment for cv in self.scale.cvs],
                    )
                    for system in self.systems
                },
                log_y=False,
            )
            for data in self.scale.data_sets
        ]
        chart(figures / name, [panels], "CV of the gaps between arrivals")
        rates = ", ".join(f"{RATES[data]:g}/s ({LABELS[data]})" for data in self.scale.data_sets)
        return Section(
            "2. Bursts (section 6.4, Figure 9)",
            f"OPT-13B, gaps between arrivals from a Gamma distribution, {rates}.",
            self.rows(results),
            [(name, "Attainment against the burstiness of arrivals")],
            [self.table(results)],
        )

    def rows(self, results: OnlineResults) -> list[Row]:
        """The claims of section 6.4. A baseline that attains nothing counts as 1e-9 in a factor."""

        def above(system: str) -> Extreme:
            return Extreme.of(
                {
                    f"{LABELS[data]}, CV {cv:g}, `{below}`": results[
                        self.burst(system, data, cv)
                    ].attainment
                    / max(results[self.burst(below, data, cv)].attainment, 1e-9)
                    for data in self.scale.data_sets
                    for cv in self.scale.cvs
                    for below in ("vllm", "sarathi")
                }
            )

        falls = [
            f"{self._falls(results, system)} of {len(self.scale.data_sets)} data sets (`{system}`)"
            for system in self.systems
        ]
        return [
            Row(
                "every system attains less as bursts grow",
                "from the least to the most bursty: in " + ", ".join(falls),
            ),
            Row(
                "`aptserve` attains more than the baselines throughout",
                f"at least as much in {self._best(results, PROJECTED)}; absorbed in "
                f"{self._best(results, ABSORBED)}",
            ),
            Row(
                "up to 7.5x the attainment of the baselines",
                f"{above(PROJECTED).times()}; absorbed {above(ABSORBED).times()}",
                "A baseline that hardly attains anything makes any factor large.",
            ),
        ]

    def _best(self, results: OnlineResults, system: str) -> str:
        """In how many settings it is no worse than the baselines."""
        settings = [(data, cv) for data in self.scale.data_sets for cv in self.scale.cvs]
        good = sum(
            results[self.burst(system, data, cv)].attainment
            >= max(results[self.burst(below, data, cv)].attainment for below in self.systems[:2])
            for data, cv in settings
        )
        return f"{good} of {len(settings)} settings"

    def _falls(self, results: OnlineResults, system: str) -> int:
        first, last = self.scale.cvs[0], self.scale.cvs[-1]
        return sum(
            results[self.burst(system, data, last)].attainment
            <= results[self.burst(system, data, first)].attainment
            for data in self.scale.data_sets
        )

    def table(self, results: OnlineResults) -> str:
        """Attainment in percent, a line a data set and CV, a column a system."""
        return table(
            ["attainment, %", *(f"`{system}`" for system in self.systems)],
            [
                [
                    f"{LABELS[data]}, CV {cv:g}",
                    *(
                        percent(results[self.burst(system, data, cv)].attainment)
                        for system in self.systems
                    ),
                ]
                for data in self.scale.data_sets
                for cv in self.scale.cvs
            ],
        )


class Ablations(Part):
    """6.5, Tables 4 and 5, and what a hidden token would have to cost."""

    systems = (KV, PROJECTED, ABSORBED, FCFS, FCFS_ABSORBED)

    def settings(self) -> Iterator[tuple[str, float, int]]:
        """Data set, rate in requests/s and CV of the paper's tables, as far as the scale has
        them."""
        for data, rate, cv in TABLES:
            if data in self.scale.data_sets and (cv == 1 or len(self.scale.cvs) > 1):
                yield data, rate, cv

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """Every system in every setting; with Poisson arrivals, `aptserve` at each of the scale's
        costs of a hidden token, too."""
        for data, rate, cv in self.settings():
            for system in self.systems:
                yield self.of(system, data, rate, cv)
        for data, rate in self.poisson():
            for cost in self.scale.costs:
                yield self.cheaper(data, rate, cost)

    def poisson(self) -> list[tuple[str, float]]:
        """Data sets and rates, requests/s, of the settings with a CV of 1."""
        return [(data, rate) for data, rate, cv in self.settings() if cv == 1]

    def of(self, system: str, data: str, rate: float, cv: float) -> OnlineCase:
        """A trace of MODEL; rate in requests/s, cv of its gaps."""
        return self.case(system, MODEL, data, rate, cv=cv)

    def cheaper(self, data: str, rate: float, cost: float) -> OnlineCase:
        """`aptserve` with Poisson arrivals; cost: factor on what reading a projected token
        takes."""
        return self.case(PROJECTED, MODEL, data, rate, hidden_cost=cost)

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 3 of the page: tables alone, so nothing is written into `figures`."""
        return Section(
            "3. The hybrid cache and the adaptive schedule, apart (section 6.5, Tables 4 and 5)",
            "OPT-13B, Gamma arrivals. Attainment in percent, the paper's in brackets; it has none "
            "for the absorbed read.",
            self.rows(results),
            [],
            [self.table(results), self.costs(results)],
        )

    def rows(self, results: OnlineResults) -> list[Row]:
        """The claims of section 6.5, in points of attainment: the hybrid cache over K and V only
        (Table 4), the adaptive schedule over FCFS (Table 5)."""

        def points(above: str, below: str) -> str:
            found = {
                f"{LABELS[data]}, {rate:g}/s, CV {cv}": 100
                * (
                    results[self.of(above, data, rate, cv)].attainment
                    - results[self.of(below, data, rate, cv)].attainment
                )
                for data, rate, cv in self.settings()
            }
            least, most = (pick(found, key=lambda key: found[key]) for pick in (min, max))
            better = sum(value > 0 for value in found.values())
            return (
                f"{found[least]:+.1f} ({least}) to {found[most]:+.1f} ({most}) points; better in "
                f"{better} of {len(found)}"
            )

        return [
            Row(
                "the hybrid cache attains 0.0 to 7.4 points more than K and V only",
                f"projected: {points(PROJECTED, KV)}. Absorbed: {points(ABSORBED, KV)}",
                self.dear(),
            ),
            Row(
                "adaptive scheduling attains 36.2 to 86.4 points more than FCFS",
                f"projected: {points(PROJECTED, FCFS)}. Absorbed: "
                f"{points(ABSORBED, FCFS_ABSORBED)}",
                self.eager(results),
            ),
        ]

    def eager(self, results: OnlineResults) -> str:
        """Why FCFS suffers from projecting."""
        data, rate, cv = next(self.settings())

        def of(system: str) -> str:
            n = results[self.of(system, data, rate, cv)]
            return f"{n.hidden:.0%} of requests hidden, {1e3 * n.step:.0f} ms a step"

        return (
            "First come, first served takes a hidden cache whenever K and V do not fit, at any "
            f"price ({LABELS[data]}, {rate:g}/s, CV {cv}: {of(FCFS)}; absorbed "
            f"{of(FCFS_ABSORBED)})."
        )

    def dear(self) -> str:
        """What a projected hidden cache costs."""
        case = self.of(PROJECTED, "longbench", 1.0, 1)
        model, prompt = place_of(case).cost_model, float(workload_of(case).prompt_len.mean())
        k = model.coefficients
        longer = 1e3 * model.num_layers * prompt * (k.hidden_token - k.decode_kv)
        base = 1e3 * model.num_layers * k.token_bias
        return (
            f"Projecting a token for every step costs {k.hidden_token / k.decode_kv:.0f} times "
            f"what reading its K and V does: one hidden cache of LongBench's mean prompt, "
            f"{prompt:,.0f} tokens, makes every step {longer:.0f} ms longer, and reading all "
            f"weights takes {base:.0f} ms. `aptserve` charges a projected cache for all the steps "
            "that its request is expected to take, and at that price next to none is worth it, so "
            "that projected it is much the same as K and V only. (Eq. 5 charges one step's delay, "
            "for a decision that the paper takes anew in every step and ours does not: see 9.) The "
            "table below makes hidden caches cheaper; absorbed, they cost next to nothing."
        )

    def table(self, results: OnlineResults) -> str:
        """Attainment in percent, the paper's in brackets, a line a setting, a column a system."""
        rows = []
        for data, rate, cv in self.settings():
            kv, hybrid, fcfs = TABLES[data, rate, cv]
            ours = [percent(results[self.of(s, data, rate, cv)].attainment) for s in self.systems]
            paper = [f" ({kv})", f" ({hybrid})", "", f" ({fcfs})", ""]
            cells = [a + b for a, b in zip(ours, paper, strict=True)]
            rows.append([f"{LABELS[data]}, {rate:g}/s, CV {cv}", *cells])
        return table(["", *(f"`{system}`" for system in self.systems)], rows)

    def costs(self, results: OnlineResults) -> str:
        """How attainment depends on what a hidden token costs."""

        def cell(n: OnlineNumbers) -> str:
            return f"{percent(n.attainment)} ({n.hidden:.0%} hidden, {1e3 * n.step:.0f} ms)"

        rows = []
        for data, rate in self.poisson():
            kv = results[self.of(KV, data, rate, 1)]
            cells = [cell(results[self.cheaper(data, rate, cost)]) for cost in self.scale.costs]
            rows.append([f"{LABELS[data]}, {rate:g}/s", cell(kv), *cells])
        heads = [f"x {cost:.3g}" for cost in self.scale.costs]
        enough = ", ".join(
            f"{self._breaks_even(results, data, rate)} ({LABELS[data]}, {rate:g}/s)"
            for data, rate in self.poisson()
        )
        return (
            "`aptserve` if a projected token cost less than we derive: attainment in percent, the "
            "share of a batch's requests with hidden caches, and the mean step. From there on the "
            f"hybrid cache attains as much as K and V only: {enough}. Below x {self._equal():.3g} "
            "a hidden token is cheaper to read than its K and V.\n\n"
            + table(["CV 1", "K and V only", *heads], rows)
        )

    def _equal(self) -> float:
        """The factor with which a hidden token costs what its K and V do."""
        k = place_of(self.of(PROJECTED, "longbench", 1.0, 1)).cost_model.coefficients
        return k.decode_kv / k.hidden_token

    def _breaks_even(self, results: OnlineResults, data: str, rate: float) -> str:
        """The largest factor from which on, downwards, the hybrid cache is no worse."""
        kv = results[self.of(KV, data, rate, 1)].attainment
        enough = None
        for cost in sorted(self.scale.costs):
            if results[self.cheaper(data, rate, cost)].attainment < kv:
                break
            enough = cost
        return "none tried" if enough is None else f"x {enough:.3g}"
