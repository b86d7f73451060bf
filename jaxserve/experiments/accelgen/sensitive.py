"""More long prompts, higher rates, and data sets alone (sections 6.4 and 6.5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.compared import times
from jaxserve.experiments.accelgen.setting import ACCELGEN, OTHERS, PAPERS, Part, lines
from jaxserve.experiments.common.claims import Row, Section
from jaxserve.experiments.common.figures import Panel, chart

PAPER = {"bookcorpus": "2.57x to 33x", "alpaca": "1.41x to 18x", "sharegpt": "1.45x to 19x"}
SHOWN = (ACCELGEN, "sarathi", "vllm")


class Sensitive(Part):
    """6.4, Figure 13."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Shares of BookCorpus at 8/s; the rates are those of Figure 11."""
        for model in self.scale.varied:
            for books in self.scale.books:
                for name in SHOWN:
                    yield from self._of(results, name, model, books)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 7 of the page."""
        figure = "accelgen-13-sensitivity.svg"
        rows = [
            ([model, f"{books:.0%}", f"`{name}`"], self._of(results, name, model, books))
            for model in self.scale.varied
            for books in self.scale.books
            for name in SHOWN
        ]
        self._draw(results, figures / figure)
        first, last = self.scale.books[0], self.scale.books[-1]
        ours, by_rate = [], []
        for model in self.scale.varied:
            low, high = (
                self.mean(results, "goodput", self._of(results, ACCELGEN, model, books))
                for books in (first, last)
            )
            ours.append(f"{model} from {low:.0f} to {high:.0f} tokens/s")
            rates = self.scale.rates(model)
            found = (
                self.mean(results, "goodput", self.seeds(results, ACCELGEN, model, rate))
                for rate in rates
            )
            by_rate.append(f"{model} {', '.join(f'{value:.0f}' for value in found)}")
        return Section(
            "7. More long prompts, and higher rates (section 6.4, Figure 13)",
            "Shares of the requests that are from BookCorpus, of whose prompts 40% have 4K tokens "
            "and more, at 8 requests/s.",
            [
                Row(
                    "goodput rises with the share of long prompts",
                    f"{first:.0%} to {last:.0%} of BookCorpus: {'; '.join(ours)}",
                    "Goodput here is of tokens written. A long prompt takes the time and the "
                    "memory of many short ones and writes no more than they.",
                ),
                Row(
                    "goodput rises with the rate, and flattens",
                    f"tokens/s at the rates of section 4: {'; '.join(by_rate)}",
                ),
            ],
            [(figure, "Goodput against the share of BookCorpus")],
            [lines(results, ["", "BookCorpus", ""], rows)],
        )

    def _of(self, results: SloResults, name: str, model: str, books: float) -> list[SloCase]:
        return self.seeds(results, name, model, 8.0, books=books)

    def _draw(self, results: SloResults, path: Path) -> None:
        shares = [100 * books for books in self.scale.books]
        panels = []
        for model in self.scale.varied:
            shown = {}
            for name in SHOWN:
                runs = [self._of(results, name, model, books) for books in self.scale.books]
                shown[name] = (shares, [self.mean(results, "goodput", cases) for cases in runs])
            panels.append(Panel(model, "tokens in time/s", shown, log_y=False))
        chart(path, [panels], "BookCorpus, %", log_x=False)


class Alone(Part):
    """6.5, Figure 14."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """Each policy at its best."""
        for data in PAPER:
            for name in (ACCELGEN, *OTHERS):
                yield from self._of(results, name, data)

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 8 of the page."""
        rows = [
            ([data, f"`{name}`"], self._of(results, name, data))
            for data in PAPER
            for name in (ACCELGEN, *OTHERS)
        ]
        claims = []
        for data, paper in PAPER.items():
            mine = self.mean(results, "goodput", self._of(results, ACCELGEN, data))
            found = {
                name: times(mine, self.mean(results, "goodput", self._of(results, name, data)))
                for name in PAPERS
            }
            low, high = (pick(found, key=lambda name: found[name]) for pick in (min, max))
            ours = f"{found[low]:.2f}x (`{low}`) to {found[high]:.2f}x (`{high}`)"
            claims.append(Row(f"{data}: {paper} the goodput", ours, WHY.get(data, "")))
        return Section(
            "8. Each data set alone (section 6.5, Figure 14)",
            f"{self.scale.first}, 8 requests/s, settings as for the mix.",
            claims,
            [],
            [lines(results, ["", ""], rows)],
        )

    def _of(self, results: SloResults, name: str, data: str) -> list[SloCase]:
        return self.seeds(results, name, self.scale.first, 8.0, data=data)


WHY = {
    "bookcorpus": (
        "Whose prompts fill the cache preempt each other, and what is lost is computed again."
    ),
    "alpaca": "8/s of these is less than what any but `orca` can serve: nobody has to choose.",
}
