"""What a replica reports about itself in numbers, and how a router uses it.

A replica publishes a `Snapshot` every 0.1 to 1 s, which may be late or lost. The functions here and
in `estimate.py` take one record or columns of them, and use only operators and NumPy's functions,
so that the compiled simulation runs the same code.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cost.cost_model import CostModel, InferMaxCostModel, LinearCostModel
from jaxserve.sched.cost.online_cost_model import OnlineCostModel

PLANES = int(blocks_for(1, 1))  # a cache is K and V


@dataclass(frozen=True, slots=True)
class Prices:
    """A replica's step-time model (InferMax section 3.2), in seconds for all layers together.

    Attributes:
        step: Every step.
        token: Each token.
        decode: Each decoding request, in addition to its token.
        read: Each cached token that a decode reads.
        prefill: A step that computes prompts.
        quad: Each unit of c^2 + 2cm of a chunk of c tokens after m.
        cached_token: Each of these m tokens.
    """

    step: float
    token: float
    decode: float
    read: float
    prefill: float
    quad: float
    cached_token: float

    @classmethod
    def from_cost_model(cls, model: CostModel) -> Prices:
        """The model's prices, without padding and moves. Every step is assumed to read all experts,
        as those with prompts do. ValueError if the model is not linear."""
        if isinstance(model, OnlineCostModel):
            model = model.model
        if isinstance(model, InferMaxCostModel):
            model = model.linear
        if not isinstance(model, LinearCostModel):
            raise ValueError(f"{type(model).__name__} has no linear prices to publish")
        k, layers = model.coefficients, model.num_layers
        return Prices(
            step=layers
            * (k.token_bias + k.batch_bias + k.decode_bias + k.per_expert * model.num_experts),
            token=layers * k.per_token,
            decode=layers * k.per_decode,
            read=layers * k.decode_kv,
            prefill=layers * (k.prefill_bias + k.per_prefill),
            quad=layers * k.prefill_quad,
            cached_token=layers * k.prefill_m,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Prices):
    """The state of a replica at one moment, in numbers. By default it has always been idle.

    Attributes:
        time: The moment, seconds on a clock that the replica shares with the routers.
        busy: Seconds from then until the device has done the launched steps. Their tokens count as
        computed.
        unfinished: Unfinished requests.
        running: Unfinished requests that hold a cache.
        cached: Tokens of their caches.
        waiting: Requests that hold no cache.
        given_up: Waiting requests that will miss their targets, according to the policy.
        relegated: Requests among these that are served behind all others, including future ones.
        relegated_tokens: Tokens that all relegated requests have yet to compute, which are in none
        of the sums below. Best-effort requests are assumed to wait for them, real-time ones not.
        realtime_tokens, best_effort_tokens: Prompt tokens of each tier yet to compute, including
        those of preempted requests.
        realtime_quad, best_effort_quad: The sum of c^2 + 2cm over these requests, each with c
        tokens to compute and m cached.
        realtime_blocks, best_effort_blocks: Blocks that the waiting ones among them need.
        free_blocks: Blocks of num_blocks that are free.
        num_blocks: Blocks of the pool.
        block_size: Tokens that a block holds.
        prefill_tokens: Most prompt tokens of a step.
        max_rows: Most requests that may hold a cache.
        tbt: The tightest TBT target of the running requests, seconds; inf for none.
        mean_output: Mean length of recent outputs, tokens; 0 before the first.
        attainment: Share of recent first tokens that were in time.
        pace: Measured step time as a multiple of the predicted one.
        by_tier: Whether real-time requests are served before best-effort ones.
        draining: Whether it takes no more requests.
        sketch: Sketch of its prefix cache, from `PrefixSketch.text`; "" if it has none.
        step, token, decode, read, prefill, quad, cached_token: See `Prices`.
    """

    time: float
    busy: float = 0.0
    unfinished: int = 0
    running: int = 0
    cached: int = 0
    waiting: int = 0
    given_up: int = 0
    relegated: int = 0
    relegated_tokens: int = 0
    realtime_tokens: int = 0
    best_effort_tokens: int = 0
    realtime_quad: int = 0
    best_effort_quad: int = 0
    realtime_blocks: int = 0
    best_effort_blocks: int = 0
    free_blocks: int
    num_blocks: int
    block_size: int
    prefill_tokens: int
    max_rows: int
    tbt: float = np.inf
    mean_output: float = 0.0
    attainment: float = 1.0
    pace: float = 1.0
    by_tier: bool
    draining: bool = False
    sketch: str = ""

    def as_dict(self) -> dict[str, Any]:
        """By name, ready for JSON."""
        return asdict(self)


SNAPSHOT = np.dtype(
    [(field.name, np.float64) for field in fields(Snapshot) if field.name != "sketch"], align=True
)

# What a router knows of a replica: its last snapshot, and what it has sent there since. time,
# unfinished, running, tbt, mean_output, attainment, by_tier, block_size: see `Snapshot`.
# realtime_work, best_effort_work: seconds of the steps and prompts before a new prompt of that
# tier; realtime_short, best_effort_short: blocks missing for all of those, negative if some are
# free; rows_short: likewise rows. token, quad: seconds of a prompt's token, including its share of
# the steps, and of the square of its length. decode: seconds of a step of all decodes; row, read:
# added seconds for another one, and for each token that it has cached; prefill: added seconds of a
# step full of prompts; idle: a step without any. per_block, per_row: seconds until one becomes
# free; output: of an output, inf if none is known. relegated_work: seconds of all work of relegated
# requests. dead, draining: it gets no requests. first_sent, last_sent: for
# the compiled simulation.
KNOWN = np.dtype(
    [
        (name, np.float64)
        for name in (
            *(
                "time",
                "unfinished",
                "running",
                "tbt",
                "mean_output",
                "attainment",
                "by_tier",
                "block_size",
            ),
            *("realtime_work", "best_effort_work", "realtime_short", "best_effort_short"),
            *("rows_short", "token", "quad", "decode", "row", "read", "prefill"),
            *("idle", "per_block", "per_row", "output", "relegated_work"),
        )
    ]
    + [("first_sent", np.int64), ("last_sent", np.int64)]
    + [("dead", np.bool_), ("draining", np.bool_)],
    align=True,
)


def reset_known(s: Any, n: Any) -> None:
    """Sets s, a record of KNOWN, to the snapshot n, with nothing sent since."""
    decode = n.pace * (n.step + n.running * (n.token + n.decode) + n.cached * n.read)
    room = max(n.prefill_tokens - n.running, 1.0)
    s.time, s.unfinished, s.running, s.tbt = n.time, n.unfinished, n.running, n.tbt
    s.mean_output, s.attainment, s.by_tier = n.mean_output, n.attainment, n.by_tier
    s.block_size, s.draining = n.block_size, n.draining > 0
    s.decode, s.row, s.read = decode, n.pace * (n.token + n.decode), n.pace * n.read
    s.prefill, s.idle = n.pace * (n.prefill + room * n.token), n.pace * n.step
    # Steps full of prompts, beside all decodes; the tokens that they read from their own cache grow
    # with every chunk.
    s.token = n.pace * n.token + (decode + n.pace * n.prefill) / room
    s.quad = n.pace * (n.quad + n.cached_token / (2.0 * room))
    late = n.best_effort_tokens * s.token + n.best_effort_quad * s.quad
    s.realtime_work = n.busy + n.realtime_tokens * s.token + n.realtime_quad * s.quad
    s.relegated_work = n.relegated_tokens * s.token
    s.best_effort_work = s.realtime_work + late
    s.realtime_short = n.realtime_blocks - n.free_blocks
    s.best_effort_short = s.realtime_short + n.best_effort_blocks
    if not n.by_tier:
        s.realtime_work, s.realtime_short = s.best_effort_work, s.best_effort_short
    s.best_effort_work += s.relegated_work
    s.rows_short = n.waiting - n.relegated + n.running - n.max_rows
    # Everything held now becomes free once in as many steps as an output has tokens.
    outputs = decode * n.mean_output
    s.per_block = outputs / max(n.num_blocks - n.free_blocks, 1.0)
    s.per_row = outputs / max(n.running, 1.0)
    s.output = outputs if outputs > 0.0 else np.inf


def prompt_seconds(s: Any, q: Any, found: Any) -> Any:
    """Seconds of q's prompts. found: cached tokens of each."""
    new = q.prompt_len - found
    return q.prompts * (new * s.token + new * (new + 2 * found) * s.quad)


def prompt_blocks(s: Any, q: Any) -> Any:
    """Blocks of q's prompts; a request that finds its prompt needs only its own last ones."""
    return (q.prompts * np.ceil(q.prompt_len / s.block_size) + q.sequences - q.prompts) * PLANES


def add_request(s: Any, q: Any, found: Any, sent: float) -> None:
    """Adds a sent request to s.

    Args:
        s: What is known of a replica, a record of KNOWN.
        q: The `RoutingRequest`.
        found: Tokens of its prompt that it is expected to find there.
        sent: When it was sent, seconds on the snapshots' clock.
    """
    seconds = prompt_seconds(s, q, found)
    blocks = prompt_blocks(s, q)
    # Time during which the replica was idle before the request came does not count.
    gone = sent - s.time
    s.best_effort_work = max(s.best_effort_work, gone) + seconds
    s.best_effort_short += blocks
    if q.tier == 0 or s.by_tier == 0:
        s.realtime_work = max(s.realtime_work, gone) + seconds
        s.realtime_short += blocks
    s.rows_short += q.sequences
    s.unfinished += q.sequences
    s.decode += q.sequences * (s.row + q.prompt_len * s.read)
    s.tbt = min(s.tbt, q.tbt)


def remove_request(s: Any, q: Any, begun: bool) -> None:
    """Takes a request that goes on elsewhere from s.

    Args:
        s: What is known of a replica, a record of KNOWN, from a snapshot with this request.
        q: The `RoutingRequest`.
        begun: Whether it decodes there, rather than waits.
    """
    blocks = prompt_blocks(s, q)
    seconds = 0.0 if begun else prompt_seconds(s, q, 0.0)
    s.best_effort_work = max(s.best_effort_work - seconds, 0.0)
    s.best_effort_short -= blocks
    if q.tier == 0 or s.by_tier == 0:
        s.realtime_work = max(s.realtime_work - seconds, 0.0)
        s.realtime_short -= blocks
    s.rows_short -= q.sequences
    s.unfinished -= q.sequences
    if begun:
        s.running -= q.sequences
        s.decode -= q.sequences * (s.row + q.prompt_len * s.read)
