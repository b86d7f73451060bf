"""How well a replica would serve a request: its predicted first token, and its likely misses.

The same fluid view as for a step: prompts are computed one after the other in full steps, and
blocks and rows become free as outputs end. See `snapshot.py` for what is known of a replica. A
server, which has its own engine's whole backlog, predicts by request
(`sched/slo/ttft_estimator.py`, which explains the differences).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.sched.routing.snapshot import prompt_blocks, prompt_seconds

NEAR = 0.6  # share of a target from which a miss is possible: predictions are inexact
DISTRUST = 0.5  # cost, in targets, of a replica where no recent request attained any
START = 0.05  # cost, in targets, of a first token that is later by a whole target
PATIENCE = 10.0  # seconds of a TTFT target for what has none, or a longer one
SAVED = 0.15  # gain, in targets, of others for a whole target less to compute


def first_token(s: Any, work: Any, short: Any, q: Any, found: Any, now: float) -> Any:
    """Predicted seconds until the first token of the last of q's sequences.

    Args:
        s: What is known of a replica, a record of KNOWN, or several as columns.
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


def violation(
    s: Any, work: Any, short: Any, q: Any, found: Any, now: float, others: Any = 1.0
) -> Any:
    """Predicted SLO violation if q goes there: its own TTFT and JCT, and the tighter of its TBT and
    that of running requests there, each from 0 to 1, the last multiplied by `others`. A replica
    with requests whose targets it has given up counts as late by the time of their work. Poor
    recent attainment adds to it, and a late first token adds a little, which breaks ties; prefixes
    found there subtract from it, since they leave time to others.

    Args:
        s: What is known of a replica, a record of KNOWN, or several as columns.
        work: s's seconds of work ahead of q's tier.
        short: s's blocks lacking for that work.
        q: The `RoutingRequest`.
        found: Tokens of its prompt that it would find in s's prefix cache.
        now: Seconds on the snapshots' clock.
        others: How many targets between tokens are missed if one is.
    """
    first = first_token(s, work, short, q, found, now)
    decode = s.decode + q.sequences * s.row + q.sequences * q.prompt_len * s.read
    tbt = (decode + s.prefill) / np.minimum(s.tbt, q.tbt)
    # Relegated requests were to come first, too, so this one may well be next where some are. Not
    # for breaking ties: if all are late anyway, the requests before it count.
    late = miss((first + s.relegated_work) / q.ttft)
    missed = late + miss((first + s.mean_output * decode) / q.jct) + others * miss(tbt)
    saved = SAVED * (q.prompts * found * s.token)
    return (
        missed + (START * first - saved) / min(q.ttft, PATIENCE) + DISTRUST * (1.0 - s.attainment)
    )


def miss(share: Any) -> Any:
    """The likelihood, 0 to 1, of missing a target of which this share is predicted to be used."""
    return np.minimum(np.maximum((share - NEAR) / (2.0 * (1.0 - NEAR)), 0.0), 1.0)
