"""How long each request may still wait, and how long its next iteration may take (section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.sched.policy import View
from jaxserve.sched.request import Tier


@dataclass(frozen=True)
class Targets:
    """Default targets, in seconds, of requests without their own. ttft: to the first token. tbt:
    between two tokens."""

    ttft: float
    tbt: float

    def token_targets(self, view: View, rows: np.ndarray) -> np.ndarray:
        """The SLO of each request's next token, float64 [n]; inf for none. Defaults apply only to
        real-time requests without a JCT target."""
        table = view.table
        first = table.generated[rows] == 0
        slo = np.where(first, table.ttft[rows], table.tbt[rows])
        bare = np.isinf(slo) & np.isinf(table.jct[rows]) & (table.tier[rows] == Tier.REALTIME)
        slo[bare] = np.where(first[bare], self.ttft, self.tbt)
        return slo


def left(view: View, rows: np.ndarray, slo: np.ndarray, clock: float) -> np.ndarray:
    """SLO - T_w: seconds until each request's next token is due. T_w is the time since its last
    token, or its arrival. A token of the step on the device counts as received at `clock`, when
    that step ends.

    Args:
        view: What the policy sees.
        rows: int64 [n].
        slo: float64 [n], from `Targets.token_targets`.
        clock: Seconds.

    Returns:
        float64 [n].
    """
    table = view.table
    waited = np.maximum(clock - table.last_token[rows], 0.0)
    waited[table.generated[rows] > table.received[rows]] = 0.0
    return slo - waited


def chunks(pending: np.ndarray, length: float | None) -> np.ndarray:
    """N_ck: iterations until each request's next token, int64 [n]. length: L_c; None if prompts are
    not cut."""
    if length is None:
        return np.ones_like(pending)
    return np.ceil(pending / max(length, 1.0)).astype(np.int64)
