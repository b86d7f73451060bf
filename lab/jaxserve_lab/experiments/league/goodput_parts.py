"""`goodput` without one of its ideas each: what every one of them brings (docs/goodput.md).

PARTS=lab/jaxserve_lab/experiments/league/goodput_parts.py
jaxserve bench league --workloads=sharegpt,alpaca --policy=$PARTS:no_moore,$PARTS:no_hidden
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policies.goodput import fairness, filling, goodput
from jaxserve.sched.policies.goodput.filling import GoodputFilling
from jaxserve.sched.policies.goodput.goodput import Goodput
from jaxserve.sched.policies.goodput.outlook import Lengths
from jaxserve.sched.policies.goodput.pausing import Memory
from jaxserve.sched.policies.goodput.prices import Prices
from jaxserve.sched.policy import View
from jaxserve.sched.registry import register

SUMMARY, SOURCE = "goodput without one of its ideas", "docs/goodput.md"
NEVER = 1e9  # seconds


class _Patched(Goodput):
    """A plan is made while something is replaced."""

    what: Callable[[], Any]

    def plan(self, view: View, now: float) -> BatchPlan:
        with type(self).what():
            return super().plan(view, now)


def _without(name: str, what: Callable[[], Any]) -> None:
    register(name, SUMMARY, SOURCE, ablation=True)(
        type(name, (_Patched,), {"what": staticmethod(what), "__module__": __name__})
    )


def _newest_first(memory: Memory) -> np.ndarray:
    """Who is paused first: who came last, as vLLM has it."""
    if memory._left is None:
        some = np.flatnonzero(~memory._work.starts & ~memory._kept)
        memory._left = some[np.argsort(-memory.view.table.seq[memory._work.rows[some]])]
    return memory._left


def _by_deadline(due: np.ndarray, cost: np.ndarray, worth: np.ndarray, begin: float) -> np.ndarray:
    """All that could be in time, the first due first."""
    order = np.argsort(due, kind="stable")
    return order[worth[order] > 0]


def _nobody(_: GoodputFilling, decodes: np.ndarray) -> np.ndarray:
    """Who is hopeless: nobody, so that all decodes take part."""
    return np.zeros(len(decodes), bool)


@register("no_hidden", SUMMARY, SOURCE, ablation=True)
def no_hidden() -> Goodput:
    """K and V only."""
    return Goodput(hidden_above=1.0)


@register("no_swaps", SUMMARY, SOURCE, ablation=True)
def no_swaps() -> Goodput:
    """Caches of the paused are computed again."""
    return Goodput(swaps=False)


@register("no_patience", SUMMARY, SOURCE, ablation=True)
def no_patience() -> Goodput:
    """Nobody comes first because of having waited."""
    return Goodput(patience=NEVER)


def _all_affordable(_: Prices, rows: np.ndarray, worth: np.ndarray) -> np.ndarray:
    """Which prompts are worth their time: all."""
    return np.ones(len(rows), bool)


def _ends(_: Lengths, view: View, rows: np.ndarray, room: np.ndarray) -> np.ndarray:
    """How likely outputs end within some tokens: surely."""
    return np.ones(len(rows))


_without("no_prices", lambda: mock.patch.object(Prices, "affordable", _all_affordable))
_without("no_bounded_time", lambda: mock.patch.object(fairness, "TIME", 1.0))
_without("no_ends", lambda: mock.patch.object(Lengths, "ends", _ends))
_without("no_loss", lambda: mock.patch.object(Memory, "_pausable", _newest_first))
_without("no_moore", lambda: mock.patch.object(filling, "in_time", _by_deadline))
_without("no_return", lambda: mock.patch.object(Memory, "_back_in_time", lambda _, some: some))
_without("no_hopeless_last", lambda: mock.patch.object(GoodputFilling, "_hopeless", _nobody))
_without("no_whole_prompts", lambda: mock.patch.object(GoodputFilling, "_short", False))
_without("no_putting_off", lambda: mock.patch.object(GoodputFilling, "_roomy", lambda *_: False))
_without("no_slack", lambda: mock.patch.object(GoodputFilling, "_least_slack", lambda *_: np.inf))
_without("no_headroom", lambda: mock.patch.object(goodput, "_headroom", lambda _: np.inf))
_without("no_step_end", lambda: mock.patch.object(View, "step_end", lambda _, now: now))
PARTS = (
    *("no_hidden", "no_swaps", "no_patience", "no_loss", "no_moore", "no_whole_prompts"),
    *(
        "no_putting_off",
        "no_slack",
        "no_headroom",
        "no_step_end",
    ),
    *("no_return", "no_hopeless_last", "no_prices", "no_bounded_time", "no_ends"),
)
