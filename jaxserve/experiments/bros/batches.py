"""How the comparison turns out with other batches of best-effort requests than the page's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.bros.ablations import COLUMNS
from jaxserve.experiments.bros.mixed import MixedCase, MixedResults
from jaxserve.experiments.bros.setting import LABELS, POLICIES, Part
from jaxserve.experiments.common.claims import Section, table
from jaxserve.experiments.common.seeds import over


class Batches(Part):
    """No part of the paper, which does not say how large its batches are."""

    def cases(self) -> Iterator[MixedCase]:
        """Each policy with each size, at a middle rate."""
        for size in self._sizes():
            for policy in POLICIES:
                yield from self._of(policy, size)

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 7 of the page."""
        rows = []
        for size in self._sizes():
            for policy in POLICIES:
                cases = self._of(policy, size)
                cells = [
                    over(results, cases, number).text(form, factor)
                    for _, number, form, factor in COLUMNS
                ]
                rows.append([f"{size:,}", f"`{policy}`", *cells])
        model, data, rate = self._point()
        return Section(
            "7. Larger and smaller batches",
            f"{LABELS[data]}, {model}, {rate:g} requests/s. How long `vllm` and `round_robin` let "
            "real-time requests wait depends on how much best-effort work is queued:",
            [],
            [],
            [table(["batch", "", *(title for title, *_ in COLUMNS)], rows)],
        )

    def _sizes(self) -> list[int]:
        return sorted({*self.scale.batches, self.scale.batch})

    def _point(self) -> tuple[str, str, float]:
        model = self.scale.models[0]
        rates = self.scale.rates(model)
        return model, self.scale.data_sets[0], rates[len(rates) // 2]

    def _of(self, policy: str, size: int) -> list[MixedCase]:
        cases = self.seeds(policy, *self._point())
        return [dataclasses.replace(case, batch=size) for case in cases]
