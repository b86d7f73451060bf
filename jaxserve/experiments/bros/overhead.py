"""What planning takes (BROS section 7.4.2, Figure 14)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.bros.mixed import MixedCase, MixedResults
from jaxserve.experiments.bros.setting import BROS, POLICIES, Part
from jaxserve.experiments.common.claims import Row, Section, table
from jaxserve.experiments.common.figures import bars
from jaxserve.experiments.common.seeds import over

DATA = "sharegpt"
PAPER = {"OPT-13B": (9.12, 9.52), "OPT-30B": (7.56, 8.42)}  # percent of an iteration


class Overhead(Part):
    """7.4.2, Figure 14."""

    def cases(self) -> Iterator[MixedCase]:
        """Those of the first part, with OPT."""
        for model, rate in self.settings():
            for policy in POLICIES:
                yield from self.seeds(policy, model, DATA, rate)

    def settings(self) -> Iterator[tuple[str, float]]:
        """Model and rate."""
        for model in self.scale.models:
            if model in PAPER:
                for rate in self.scale.rates(model):
                    yield model, rate

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 4 of the page."""
        shares = {
            setting: over(results, self.seeds(BROS, setting[0], DATA, setting[1]), "plan").mean
            for setting in self.settings()
        }
        claims = []
        for model, (least, most) in PAPER.items():
            mine = [share for (name, _), share in shares.items() if name == model]
            if mine:
                ours = f"{min(mine):.2%} to {max(mine):.2%}"
                claims.append(Row(f"{least}% to {most}% with {model}", ours, WHY))
        figure = "bros-14-overhead.svg"
        names = [f"{model}\n{rate:g}/s" for model, rate in shares]
        percent = [100 * share for share in shares.values()]
        bars(figures / figure, names, percent, "of the batches' time, %", "{:.2f}")
        header = ["", "rate, 1/s"]
        header += [f"{policy}: share, %; P99, ms" for policy in POLICIES]
        rows = []
        for model, rate in self.settings():
            cells = []
            for policy in POLICIES:
                cases = self.seeds(policy, model, DATA, rate)
                share, slowest = (over(results, cases, name) for name in ("plan", "plan_p99"))
                cells.append(f"{100 * share.mean:.2f}; {1e3 * slowest.mean:.2f}")
            rows.append([model, f"{rate:g}", *cells])
        return Section(
            "4. The time of a plan (section 7.4.2, Figure 14)",
            "CPU seconds of all plans of a run, measured on the machine that made this page, over "
            "the seconds that the simulated GPUs take for the batches: what planning would add to "
            "an iteration if nothing hid it. The engine plans a step while the one before it runs.",
            claims,
            [
                (
                    figure,
                    "What planning takes, of the time of the batches; the paper has 7.6% to 9.5%",
                )
            ],
            [table(header, rows)],
        )


WHY = (
    "Arrays instead of loops over requests, and one call of the cost model for all batch sizes; "
    "and the paper's machine is another."
)
