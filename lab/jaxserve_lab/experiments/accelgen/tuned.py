"""At which of their settings policies serve best: found by trying."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve_lab.experiments.accelgen.case import SloCase, SloNumbers
from jaxserve_lab.experiments.accelgen.places import PLACES
from jaxserve_lab.experiments.common.runs import Results

TRIAL = 100  # seed of a trace that is on no other part of the page
BUDGETS = (128, 256, 512, 1024, 2048)  # tokens, beside the paper's pivot
FASTSERVE = (
    # As it is, with longer patience, and as the paper has it, on Orca.
    "fastserve",
    "fastserve:patience=1000",
    "fastserve:patience=1000:max_rows=8:reserve=whole",
)
FASTGEN = ("fastgen", "fastgen:watermark=0.3")


@dataclass(frozen=True)
class Tuned:
    """A policy with its settings. budget: tokens of a batch; 0 where the policy decides."""

    policy: str
    budget: int = 0


def choices(name: str, model: str) -> tuple[Tuned, ...]:
    """The settings to try of a policy; one if it has nothing to set."""
    if name == "fastserve":
        return tuple(Tuned(policy) for policy in FASTSERVE)
    if name not in ("sarathi", "fastgen", "edf", "infermax"):
        return (Tuned(name),)
    policies = FASTGEN if name == "fastgen" else (name,)
    budgets = sorted({*BUDGETS, PLACES[model].pivot})
    return tuple(Tuned(policy, budget) for policy in policies for budget in budgets)


@dataclass(frozen=True)
class Trial:
    """Where settings are tried.

    Attributes:
        rate: Requests/s.
        requests: Of the trace.
        ease: Factor on the TTFTs.
        number: Of `SloNumbers`; the best setting has most of it.
    """

    rate: float
    requests: int
    ease: float
    number: str

    def runs(self, name: str, model: str) -> dict[Tuned, SloCase]:
        """The runs that decide, by setting; none where there is no choice."""
        found = choices(name, model)
        if len(found) == 1:
            return {}
        return {
            one: SloCase(
                one.policy, model, self.rate, one.budget, TRIAL, self.requests, ease=self.ease
            )
            for one in found
        }

    def best(self, results: Results[SloCase, SloNumbers], name: str, model: str) -> Tuned | None:
        """The best setting; None until all have been tried."""
        found = {chosen: results.get(case) for chosen, case in self.runs(name, model).items()}
        if None in found.values():
            return None
        if not found:
            return choices(name, model)[0]
        return max(found, key=lambda chosen: getattr(found[chosen], self.number))
