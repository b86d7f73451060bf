"""What the compiled simulation keeps, as arrays of records.

A request is known by its number in the workload, and is one record all the way. Blocks are counted,
not named: the family neither shares them nor moves caches.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.unified.policy_spec import FLOATS, INTEGERS

# asked_*: targets as they were asked for, which routers see; ttft, tbt, jct: those that count.
# key, behind, first, second: its place in the policy's order, see `order.before`. offset: where its
# tokens' times begin. held: blocks a plane. growth: blocks that it is expected to take yet. tokens,
# reserve: as planned for the next step. decided: it is in the batch in the making, or preempted for
# it. state, lost_from: as in `sched/state/request_table.py`. losses, losses_since: as in
# `sched/progress.py`. sent: when a router sent it to its replica; next_sent: who was sent there
# next, -1 for nobody; again: it went elsewhere, since its replica died; failed: it ended with it.
ASKED = tuple(f"asked_{name}" for name in TARGETS)
REQUEST = np.dtype(
    [(name, np.float64) for name in (*FLOATS, *ASKED, "given", "key", "first", "sent")]
    + [
        (name, np.int64)
        for name in (
            *INTEGERS,
            *("seed", "most_output", "max_tokens", "output_len", "offset", "replica"),
            *("behind", "second", "received", "held", "growth", "tokens", "reserve", "state"),
            *("preemptions", "preempted_order", "last_batch_order"),
            *("lost_from", "losses", "losses_since", "next_sent"),
        )
    ]
    + [
        (name, np.bool_) for name in ("waiting", "decoding", "decided", "greedy", "again", "failed")
    ],
    align=True,
)

# Of a replica. next_time: when its loop comes round; woken: when the first of those came that woke
# it up just now, else -inf. live: requests that are not over. first, end: where in its list those
# that wait are. free: blocks. arrivals, batch_order, preempted: how many there have been. gone:
# preempted since the last batch. again: tokens of the batch that were in the cache already before
# it was lost. flying: rows of the launched step that sample, -1 where none is in flight;
# flying_end: when it ends; side: which list has them. got_on: steps that computed something new;
# most_losses: of any one request since the last of them. outputs: how many have ended; ended: with
# the last tokens that reached the host, at `landed`. came: requests that the host has not taken
# in. next_lapse: no key of those that wait lapses before. slowdown: times
# as long as its steps should take; pace, mean_output, attainment, seen_outputs,
# seen_firsts: as `routing.observe.Lately`; draw: for the losses of its snapshots; dead; stranded:
# up to whom those that it had have been looked at since; lot: its first of a `Scatter`; slow:
# times as long as its terms say that the host takes; changed: since its last snapshot.
#
# Of the batch in the making: what C, P, rows and slots are left; holders: requests that hold cache;
# promised: blocks that those who run are expected to take yet; prefills: whether C and P leave
# something for them; barrier: only those before this request may start, ANYBODY or NOBODY; chosen,
# victims: how many; tail: the last of those that run who has not been looked at as a victim;
# scanned: how far in the list of those that wait; undecided: blocks of those that run
# and are not decided.
REPLICA = np.dtype(
    [
        (name, np.float64)
        for name in (
            *("clock", "device_free", "next_time", "woken", "flying_end", "landed"),
            *("slowdown", "slow", "pace", "mean_output", "attainment", "next_lapse"),
        )
    ]
    + [
        (name, np.int64)
        for name in (
            *("live", "running", "first", "end", "free", "arrivals", "batch_order", "preempted"),
            *("gone", "again", "flying", "side", "batches", "outputs", "ended", "came"),
            *("got_on", "most_losses", "seen_outputs", "seen_firsts", "draw", "stranded", "lot"),
            *("batch_left", "prefill_left", "rows_left", "slots_left", "holders", "promised"),
            *("barrier", "chosen", "victims", "tail", "scanned", "undecided"),
        )
    ]
    + [(name, np.bool_) for name in ("prefills", "dead", "changed")],
    align=True,
)

# What is the same for all, and never changes. Groups are in an array of their own.
SETTINGS = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("max_batch_tokens", "max_prefill_tokens", "max_rows", "watermark", "reserve"),
            *("num_blocks", "block_size", "enough", "capacity", "routing", "routers"),
        )
    ]
    + [(name, np.float64) for name in ("interval", "age", "loss")]
    + [
        (name, np.bool_)
        for name in (
            *("mixed_batches", "chunked", "keyed", "requeue", "probing", "expects", "promises"),
            *("lapses", "overlap", "looks", "keeps_batches"),
        )
    ],
    align=True,
)
# Of a router. turn, state: as `routing.routers.Lots`.
ROUTER = np.dtype([(name, np.int64) for name in ("turn", "state")])
# Of all. arrived: requests so far; chosen: the replica of the one that is on its way, or NOTHING.
CURSOR = np.dtype([(name, np.int64) for name in ("arrived", "chosen")])
# Of a replica, as `setting.Fault`; time: inf for none.
FAULTS = np.dtype([(name, np.float64) for name in ("time", "slowdown", "notice")])
HOST = np.dtype([(field.name, np.float64) for field in fields(HostOverhead)])
GROUP = np.dtype([(name, np.bool_) for name in ("decode", "prefill", "waiting", "preempts")])

ANYBODY, NOBODY = -1, -2  # as a barrier
NOTHING = -1  # in flight


class Rules(NamedTuple):
    """What never changes. settings, host: one record each, [1]; groups: [any]."""

    settings: np.ndarray
    host: np.ndarray
    groups: np.ndarray


class World(NamedTuple):
    """All there is, as arrays by replica where nothing else is said.

    requests, token_times: of all, [n] and [tokens]. cursor: [1]. known: what routers know of each;
    published: its snapshot that is on its way; routers: [routers]; faults. event_times, event_heap,
    event_place: see `events.py`. running: those
    that hold cache. waiting: those that wait; needs, lapses: [n], by request, the
    blocks for which such a one would start, and when its key lapses. chosen, victims: of the batch
    in the making. flying: [replicas, 2, :], those that sample in the launched step, and in the one
    before. scratch: for sorting. log: batches so far. reached, ended, mean, expected, by bin, and
    bins_above, bin_of, by length: see `output_lengths.py`.
    """

    requests: np.ndarray
    token_times: np.ndarray
    cursor: np.ndarray
    routers: np.ndarray
    known: np.ndarray
    published: np.ndarray
    faults: np.ndarray
    event_times: np.ndarray
    event_heap: np.ndarray
    event_place: np.ndarray
    replicas: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    needs: np.ndarray
    lapses: np.ndarray
    chosen: np.ndarray
    victims: np.ndarray
    flying: np.ndarray
    scratch: np.ndarray
    log: np.ndarray
    reached: np.ndarray
    ended: np.ndarray
    mean: np.ndarray
    expected: np.ndarray
    bins_above: np.ndarray
    bin_of: np.ndarray


class Machine(NamedTuple):
    """One replica's part of it. me: its own record, [1]. running is in the policy's order once
    `order.refresh` has put it there; waiting always is, from me.first to me.end."""

    requests: np.ndarray
    me: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    needs: np.ndarray
    lapses: np.ndarray
    chosen: np.ndarray
    victims: np.ndarray
    flying: np.ndarray
    scratch: np.ndarray
    log: np.ndarray
    reached: np.ndarray
    ended: np.ndarray
    mean: np.ndarray
    expected: np.ndarray
    bins_above: np.ndarray
    bin_of: np.ndarray
