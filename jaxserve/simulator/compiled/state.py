"""The state of the compiled simulation, as arrays of records.

A request is named by its number in the workload, and stays in one record. Blocks are only counted,
except for pages of the prefix cache (`pages.py`): these policies do not move caches.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import numpy as np

from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.slo.slo_columns import TARGETS
from jaxserve.sched.unified.policy_spec import FLOATS, INTEGERS

# A request. Fields that are not explained here are columns of `RequestTable`.
#   asked_*: targets as they were asked for, which routers see; ttft, tbt, jct: those that count.
#   key, behind, first, second: its place in the policy's order, see `order.before`.
#   offset: where its tokens' times begin.
#   held: blocks a plane.
#   pages: those of them that others may find, which come first.
#   found: pages that it would find; of one that waits.
#   read: those of them that several read; as of when it was considered last.
#   hit: tokens that it found when it first started.
#   parent, common, base: as in `BlockKeys`.
#   growth: blocks that it is expected to take yet.
#   tokens, reserve: as planned for the next step.
#   decided: it is in the batch in the making, or preempted for it.
#   losses, losses_since: as in `sched/progress.py`.
#   sent: when a router sent it to its replica.
#   next_sent: the request sent there next, -1 for none.
#   begun: tokens that other replicas have generated of it, which have died.
#   failed: it ended with its replica, since no other one was up.
#   late: it has targets that cannot be met without what is cached of its prompt.
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
            *("pages", "found", "read", "hit", "parent", "common", "base", "begun"),
        )
    ]
    + [(name, np.bool_) for name in ("waiting", "decoding", "decided", "greedy", "failed", "late")],
    align=True,
)

# A replica.
#   next_time: when its loop runs next.
#   woken: when the first of the arrivals came that just woke it up, else -inf.
#   live: requests that have not ended.
#   first, end: where the waiting requests are in their list.
#   free: blocks that nobody holds.
#   unread: those of them that are known.
#   shared: blocks that several hold.
#   moved: whether those who wait may find other pages than they did.
#   arrivals, batch_order, preempted: how many there have been.
#   gone: preempted since the last batch.
#   again: tokens of the batch that are computed again after their cache was lost.
#   flying: rows of the launched step that sample, -1 if none is in flight.
#   flying_end: when that step ends.
#   side: the row of `Machine.flying` with its requests.
#   got_on: steps that computed something new.
#   most_losses: of any one request since the last of them.
#   outputs: how many have ended.
#   ended: how many ended with the last tokens that reached the host, at `landed`.
#   came: requests that the host has not taken in.
#   next_lapse: no key of a waiting request lapses before.
#   slowdown: factor on how long its steps take.
#   slow: factor on how long its host takes.
#   pace, mean_output, attainment, seen_outputs, seen_firsts: as in `take_snapshot.Lately`.
#   draw: state of the draws of which snapshots get lost.
#   stranded: the first request that has not been looked at since it died.
#   lot: where its batches begin in the draws of a `Scatter`.
#   changed: since its last snapshot.
#
# Its batch in the making.
#   batch_left, prefill_left, rows_left, slots_left, blocks_left: of C, P, rows, slots and M.
#   holders: requests that hold cache.
#   promised: blocks that running requests are expected to take yet.
#   prefills: whether C and P leave something for prefills.
#   barrier: only requests before this one may start; or ANYBODY or NOBODY.
#   chosen, victims: how many.
#   tail: the last running request that has not been considered as a victim.
#   scanned: up to where the waiting list has been considered.
#   undecided: blocks of running requests that are not decided.
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
            *("batch_left", "prefill_left", "rows_left", "slots_left", "blocks_left", "holders"),
            *("promised", "barrier", "chosen", "victims", "tail", "scanned", "undecided"),
            *("unread", "shared"),
        )
    ]
    + [(name, np.bool_) for name in ("prefills", "dead", "changed", "moved")],
    align=True,
)

# A page, which is a block of K and one of V.
#   refs: requests that hold it.
#   before, after: in the list of those that nobody reads, which begins at page 0.
#   known: whether it is there.
#   watched: whether somebody who waits finds it as the last, or lacks it first.
PAGE = np.dtype(
    [(name, np.int32) for name in ("refs", "before", "after")]
    + [(name, np.bool_) for name in ("known", "watched")],
    align=True,
)

# The setting and the policy, which never change. Groups are in an array of their own.
SETTINGS = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("max_batch_tokens", "max_prefill_tokens", "max_rows", "watermark", "reserve"),
            *("num_blocks", "block_size", "enough", "capacity", "routing", "routers", "chunk"),
        )
    ]
    + [(name, np.float64) for name in ("interval", "age", "loss")]
    + [
        (name, np.bool_)
        for name in (
            *("mixed_batches", "chunked", "keyed", "requeue", "probing", "expects", "promises"),
            *("lapses", "overlap", "looks", "keeps_batches", "reuse"),
        )
    ],
    align=True,
)
# A router, as `routing.routers.Lots`.
ROUTER = np.dtype([(name, np.int64) for name in ("turn", "state")])
# How far arrivals have got.
#   arrived: requests so far.
#   chosen: the replica of the request on its way, or NOTHING.
CURSOR = np.dtype([(name, np.int64) for name in ("arrived", "chosen")])
# The fault of a replica, as `settings.Fault`; time is inf for none.
FAULTS = np.dtype([(name, np.float64) for name in ("time", "slowdown", "notice")])
HOST = np.dtype([(field.name, np.float64) for field in fields(HostOverhead)])
GROUP = np.dtype([(name, np.bool_) for name in ("decode", "prefill", "waiting", "preempts")])

ANYBODY, NOBODY = -1, -2  # as a barrier
NOTHING = -1  # in flight


class Rules(NamedTuple):
    """Constants of a simulation.

    Attributes:
        settings: One record of SETTINGS, [1].
        host: One record of HOST, [1].
        groups: Records of GROUP, in the policy's order.
    """

    settings: np.ndarray
    host: np.ndarray
    groups: np.ndarray


class Machine(NamedTuple):
    """The state of one replica, or in `World.machines` of all of them, whose arrays then have a
    leading axis of replicas unless they are the same for all.

    Attributes:
        requests: [n], records of REQUEST, the same for all.
        me: [1], its own record of REPLICA.
        running: Requests that hold cache, in the policy's order once `order.refresh` has run.
        waiting: Requests that wait, always in order, from me.first to me.end.
        needs: [n], free blocks with which a waiting request could start; the same for all.
        lapses: [n], when the key of a waiting request lapses; the same for all.
        chosen, victims: Requests of the batch in the making, and those preempted for it.
        flying: [2, :], requests that sample in the launched step and in the one before.
        scratch: For sorting.
        log: Batches so far, records of BATCH.
        reached, ended, mean, expected: By bin of output lengths, see
            `sched/state/output_lengths.py`.
        bins_above, bin_of: The same by length; for all replicas.
        pages: Records of PAGE, by number; one without prefix caching.
    """

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
    pages: np.ndarray


class World(NamedTuple):
    """The whole state of a simulation. Arrays are by replica unless noted.

    Attributes:
        requests: [n], records of REQUEST.
        token_times: [sum of output_len], when each token reached the host.
        cursor: [1], a record of CURSOR.
        routers: By router, records of ROUTER.
        known: What the routers know, records of KNOWN.
        published: Snapshots in flight, records of SNAPSHOT.
        faults: Records of FAULTS.
        event_times, event_heap, event_place: By event, see `events.py`.
        machines: Those of all replicas.
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
    machines: Machine
