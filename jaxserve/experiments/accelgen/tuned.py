"""At which of their settings policies serve best: found by trying."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.experiments.accelgen.case import SloCase, SloResults
from jaxserve.experiments.accelgen.places import PLACES

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
    """policy: with its parameters; budget: tokens of a batch, 0 where the policy decides."""

    policy: str
    budget: int = 0


def choices(name: str, model: str) -> tuple[Tuned, ...]:
    """What is tried of a policy there; one only of those that have nothing to set."""
    if name == "fastserve":
        return tuple(Tuned(policy) for policy in FASTSERVE)
    if name not in ("sarathi", "fastgen", "edf", "infermax"):
        return (Tuned(name),)
    policies = FASTGEN if name == "fastgen" else (name,)
    budgets = sorted({*BUDGETS, PLACES[model].pivot})
    return tuple(Tuned(policy, budget) for policy in policies for budget in budgets)


def trials(name: str, model: str, rate: float, requests: int) -> dict[Tuned, SloCase]:
    """The runs that decide; none where there is no choice."""
    found = choices(name, model)
    if len(found) == 1:
        return {}
    return {
        chosen: SloCase(chosen.policy, model, rate, chosen.budget, TRIAL, requests)
        for chosen in found
    }


def best(results: SloResults, name: str, model: str, rate: float, requests: int) -> Tuned | None:
    """The setting with most tokens in time a second; None until all have been tried."""
    runs = trials(name, model, rate, requests)
    if not all(case in results for case in runs.values()):
        return None
    if not runs:
        return choices(name, model)[0]
    return max(runs, key=lambda chosen: results[runs[chosen]].goodput)
