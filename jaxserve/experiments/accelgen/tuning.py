"""What each policy is run with, and how that was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import OTHERS, RATES, TUNED_AT, Part
from jaxserve.experiments.accelgen.tuned import TRIAL
from jaxserve.experiments.common.claims import Section, table


class Settings(Part):
    """3.1: token budgets are the pivot there."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """All trials."""
        for model in self.scale.models:
            for name in OTHERS:
                yield from self.trials(name, model).values()

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 1 of the page."""
        rows = []
        for model in self.scale.models:
            for name in OTHERS:
                runs, chosen = self.trials(name, model), self.tuned(results, name, model)
                if not runs:
                    continue
                tried = [
                    f"{self._said(setting.policy, name, setting.budget)}: "
                    f"{results[case].goodput:.0f}"
                    for setting, case in runs.items()
                ]
                assert chosen is not None
                kept = self._said(chosen.policy, name, chosen.budget)
                rows.append([model, f"`{name}`", kept, "; ".join(tried)])
        rates = ", ".join(f"{RATES[model][TUNED_AT]:g}" for model in self.scale.models)
        return Section(
            "1. Settings",
            f"The paper takes the pivot as the token budget of all. Here each policy is run with "
            f"the setting with which most tokens came in time a second, in one trace at {rates} "
            f"requests/s that is on no other part of the page (seed {TRIAL}). `accelgen` is as it "
            "comes. `vllm`, `orca` and `fastserve` compute whole prompts; newer versions of vLLM "
            "do as `sarathi`. Host memory for `fastserve`: 144 GB for each GPU.",
            [],
            [],
            [table(["", "", "best", "goodput of each, tokens/s"], rows)],
        )

    def _said(self, policy: str, name: str, budget: int) -> str:
        """In a cell: parameters, and the budget."""
        with_what = policy.removeprefix(name).lstrip(":").replace(":", ", ")
        parts = [with_what, str(budget) if budget else ""]
        return ", ".join(part for part in parts if part) or "as it comes"
