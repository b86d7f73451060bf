"""What each policy is run with, and how that was found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.setting import EASE, LOADED, OTHERS, RATES, SERVED, Part
from jaxserve.experiments.accelgen.tuned import TRIAL, choices
from jaxserve.experiments.common.claims import Section, table

AT = (LOADED, SERVED)  # of RATES


class Settings(Part):
    """3.1: token budgets are the pivot there."""

    def cases(self, results: SloResults) -> Iterator[SloCase]:
        """All trials."""
        for model in self.scale.models:
            for ease in (1.0, EASE):
                for name in OTHERS:
                    yield from self.trial(model, ease).runs(name, model).values()

    def section(self, results: SloResults, figures: Path) -> Section:
        """Section 1 of the page."""
        header = ["", "", "best", "goodput of each, tokens/s"]
        header += ["best, TTFT x 10", "goodput of each, requests/s"]
        rows = []
        for model in self.scale.models:
            for name in OTHERS:
                if len(choices(name, model)) == 1:
                    continue
                row = [model, f"`{name}`"]
                for ease, form in ((1.0, "{:.0f}"), (EASE, "{:.2f}")):
                    row += self._tried(results, name, model, ease, form)
                rows.append(row)
        rates = [", ".join(f"{RATES[m][at]:g}" for m in self.scale.models) for at in AT]
        return Section(
            "1. Settings",
            "The paper takes the pivot as the token budget of all. Here each policy is run with "
            f"the setting with which most tokens came in time a second, in one trace at {rates[0]} "
            f"requests/s that is on no other part of the page (seed {TRIAL}); where TTFTs are "
            f"{EASE:g} times as long, with the one with which most requests ended within all of "
            f"their targets, at {rates[1]} requests/s. `accelgen` is as it comes. `vllm`, `orca` "
            "and `fastserve` compute whole prompts; newer versions of vLLM do as `sarathi`. Host "
            "memory for `fastserve`: 144 GB for each GPU.",
            [],
            [],
            [table(header, rows)],
        )

    def _tried(
        self, results: SloResults, name: str, model: str, ease: float, form: str
    ) -> list[str]:
        """The best, and what each came to."""
        trial = self.trial(model, ease)
        chosen, runs = trial.best(results, name, model), trial.runs(name, model)
        assert chosen is not None
        tried = (
            f"{self._said(setting.policy, name, setting.budget)}: "
            + form.format(getattr(results[case], trial.number))
            for setting, case in runs.items()
        )
        return [self._said(chosen.policy, name, chosen.budget), "; ".join(tried)]

    def _said(self, policy: str, name: str, budget: int) -> str:
        """In a cell: parameters, and the budget."""
        with_what = policy.removeprefix(name).lstrip(":").replace(":", ", ")
        parts = [with_what, str(budget) if budget else ""]
        return ", ".join(part for part in parts if part) or "as it comes"
