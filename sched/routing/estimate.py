"""How well a replica would serve a request: its predicted first token, and what it would miss.

The same fluid view as of a step: prompts are computed one after the other in steps full of them,
and blocks and rows become free as outputs end. See `snapshot.py` for what is known of a replica.
A door, which has its own engine's whole backlog, predicts by request
(`sched/slo/ttft_estimator.py`, which says how the two differ).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.routing.snapshot import prompt_blocks, prompt_seconds

NEAR = 0.6  # of a target, from where a miss is possible: predictions are not exact
DISTRUST = 0.5  # targets that a replica loses where nobody attained any there lately
START = 0.05  # targets that a request loses for a first token a whole target later
SAVED = 0.15  # targets that others gain by a whole target less to compute


def first_token(s: Any, work: Any, short: Any, q: Any, found: Any, now: float) -> Any:
    """Predicted seconds until the first token of the last of q's sequences.

    Args:
        s: What is known of a replica, a record of KNOWN, or of several as columns.
        work: s's seconds of work ahead of q's tier.
        short: s's blocks lacking for that work.
        q: The `RoutingRequest`.
        found: Tokens of its prompt that it would find in s's prefix cache.
        now: Seconds on the snapshots' clock.
    """
    need = prompt_blocks(s, q)
    room = np.maximum((short + need) * s.per_block, (s.rows_short + q.sequences) * s.per_row)
    wait = np.maximum(np.maximum(work, room) - (now - s.time), 0.0)
    return wait + prompt_seconds(s, q, found) + s.decode


def violation(s: Any, work: Any, short: Any, q: Any, found: Any, now: float) -> Any:
    """Predicted SLO violation if q goes there: its own TTFT and JCT, and the tighter of its TBT and
    those running there, each from 0 to 1. A replica with requests whose targets it has given up
    counts as late by as much as it has to compute for them. Some is added for poor recent
    attainment, and a little for a late first token, which breaks ties; some is taken off for what q
    finds there, since that leaves the time to others.

    Args:
        s: What is known of a replica, a record of KNOWN, or of several as columns.
        work: s's seconds of work ahead of q's tier.
        short: s's blocks lacking for that work.
        q: The `RoutingRequest`.
        found: Tokens of its prompt that it would find in s's prefix cache.
        now: Seconds on the snapshots' clock.
    """
    first = first_token(s, work, short, q, found, now)
    decode = s.decode + q.sequences * s.row + q.sequences * q.prompt_len * s.read
    tbt = (decode + s.prefill) / np.minimum(s.tbt, q.tbt)
    # Whoever is relegated was to come first, too: where that is, this one may well be next. Not for
    # what breaks ties: where all are late anyway, what counts is who is before it.
    late = _miss((first + s.relegated_work) / q.ttft)
    missed = late + _miss((first + s.mean_output * decode) / q.jct) + _miss(tbt)
    saved = SAVED * (q.prompts * found * s.token)
    return missed + (START * first - saved) / min(q.ttft, 10.0) + DISTRUST * (1.0 - s.attainment)


def _miss(share: Any) -> Any:
    """How likely a target is missed, 0 to 1, when this share of it is predicted to be used."""
    return np.minimum(np.maximum((share - NEAR) / (2.0 * (1.0 - NEAR)), 0.0), 1.0)
