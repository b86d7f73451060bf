"""Runs several predictable steps at once.

While every request decodes, none waits and memory lasts, the plans of a policy that serves every
request (`Policy.steady`) are known, and a run of steps takes a few array operations.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.cache.block_pool import BlockPool
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.step_residuals import Draws
from jaxserve.sched.step_timing import Watched
from jaxserve.simulator.replica.clock import Clock
from jaxserve.simulator.settings import BATCH, Setting

COAST_CELLS = 200_000  # most rows x steps computed at once


@dataclass(frozen=True)
class InFlight:
    """A launched step whose tokens are not on the host yet.

    Attributes:
        end: When it ends.
        rows: Rows that sample.
    """

    end: float
    rows: int


@dataclass(frozen=True)
class Decoding:
    """All n live requests of a replica, which all decode.

    Attributes:
        cached: int64 [n], tokens in the cache.
        room: int64 [n], tokens that their blocks have room for.
        left: int64 [n], tokens still to generate.
        most: Most steps to run.
    """

    cached: np.ndarray
    room: np.ndarray
    left: np.ndarray
    most: int


@dataclass
class Stretch:
    """Steps that were run together.

    Attributes:
        log: Their records, of BATCH.
        clock: The clock after them.
        last: The prediction for the last one.
        reached: When the tokens of each step were on the host; without the last step if steps
        overlap.
        reached_first: The same for the step that was in flight before them; nan if there was none.
        submitted: When the last one was handed to the device.
    """

    log: np.ndarray
    clock: Clock
    last: Watched = field(init=False)
    reached: list[float] = field(default_factory=list)
    reached_first: float = math.nan
    submitted: float = math.nan

    def __len__(self) -> int:
        return len(self.log)

    @property
    def done(self) -> float:
        """When tokens reached the host for the last time; nan if none did."""
        return self.reached[-1] if self.reached else self.reached_first


def stretch(
    decoding: Decoding,
    pool: BlockPool,
    setting: Setting,
    clock: Clock,
    flying: InFlight | None,
    horizon: float,
    ahead: tuple[Draws | None, int] = (None, 0),
) -> Stretch | None:
    """Runs as many steps as are predictable at once.

    Args:
        decoding: The requests.
        pool: Their blocks, which are not changed.
        setting: Costs, padding and overlap.
        clock: The clock before the steps, which is not changed.
        flying: The step in flight, if any.
        horizon: When something else may happen; no step is planned from then on.
        ahead: The draws of deviations from the cost model, and the number of the next batch.

    Returns:
        The steps; None if none is predictable.
    """
    left = decoding.left
    reach = min(decoding.most, max(1, COAST_CELLS // len(left)))
    if horizon < math.inf:
        kv = np.array([int(decoding.cached.sum()) + len(left)])
        first = BatchFeatures.of_decodes(np.array([len(left)]), kv, setting.padding)
        expected = float(setting.cost_model.batch_time(first)[0])
        reach = min(reach, int((horizon - clock.now) / max(expected, 1e-9)) + 2)
    step = np.arange(1, max(1, reach) + 1)
    active = left[:, None] >= step
    length = (decoding.cached[:, None] + step) * active
    used = (pool.blocks_for(np.maximum(length, decoding.room[:, None])) * active).sum(axis=0)
    enough = used <= pool.num_blocks
    steps = len(step) if enough.all() else int(np.argmin(enough))
    rows = active.sum(axis=0)[:steps]
    kv = _read(length[:, :steps], rows, setting.padding)
    features = BatchFeatures.of_decodes(rows, kv, setting.padding)
    seconds = np.asarray(setting.cost_model.batch_time(features), np.float64)
    draws, batch = ahead
    predicted, paces = seconds, [1.0] * steps
    if draws is not None:
        seconds = seconds * draws.residuals(batch, seconds, prompts=False)
        paces = draws.of_host(batch, steps).tolist()
    found = _go(setting, clock, flying, rows.tolist(), seconds.tolist(), paces, horizon)
    log, steps = found.log, len(found)
    log["duration"] = seconds[:steps]
    log["num_tokens"] = log["num_decodes"] = rows[:steps]
    log["kv_used"] = pool.as_tokens(used[:steps])
    if not steps:
        return None
    of_last = BatchFeatures.of_decodes(rows[steps - 1], kv[steps - 1], setting.padding)
    found.last = Watched(of_last, float(predicted[steps - 1]), found.submitted)
    return found


def _go(
    setting: Setting,
    clock: Clock,
    flying: InFlight | None,
    rows: list[int],
    seconds: list[float],
    paces: list[float],
    horizon: float,
) -> Stretch:
    """The loop of `Replica`, only for its times."""
    found = Stretch(np.zeros(0, BATCH), dataclasses.replace(clock))
    clock, starts, live = found.clock, [], rows[0] if rows else 0
    for count, took, pace in zip(rows, seconds, paces, strict=True):
        if clock.now >= horizon:
            break
        clock.pace = pace
        clock.receive(0)
        clock.plan(live if setting.overlap else count)
        live = count
        start, end = clock.launch(count, 0, 0, took, idle=flying is None)
        starts.append(start)
        found.submitted = clock.now
        if flying is not None:
            found.reached.append(clock.land(flying.end))
            clock.finish(flying.rows)
        flying = InFlight(end, count)
        if not setting.overlap:
            found.reached.append(clock.land(end))
            clock.finish(count)
            flying = None
    if setting.overlap and starts:
        found.reached_first = found.reached.pop(0)
    found.log = np.zeros(len(starts), BATCH)
    found.log["start"] = starts
    return found


def _read(length: np.ndarray, rows: np.ndarray, padding: Padding | None) -> np.ndarray:
    """Tokens that decodes over length [n, steps] cached ones read in each step, int64 [steps]; 0
    stands for a request that has ended. rows: number of the others."""
    if padding is None or padding.decode_group == 1:
        return np.asarray(length.sum(axis=0))
    return np.array(
        [
            padding.read(column[column > 0], padding.padded(count, True))
            for column, count in zip(length.T, rows.tolist(), strict=True)
        ],
        np.int64,
    )
