"""Every policy serves requests of which some read blocks that others have filled."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.registry import deployable
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import WAITING
from tests.sched.driver import Drive

SIZE = 4  # tokens of a block
POLICIES = deployable()


def keys_of(tokens: np.ndarray) -> tuple[bytes, ...]:
    """Of the full blocks of these tokens: all tokens up to the end of each."""
    return tuple(tokens[:end].tobytes() for end in range(SIZE, len(tokens) + 1, SIZE))


class Conversations:
    """Requests that repeat what earlier ones wrote, and tell the scheduler what they wrote."""

    def __init__(self, drive: Drive, rng: np.random.Generator) -> None:
        self.drive, self.rng = drive, rng
        self.tokens: dict[int, np.ndarray] = {}  # by row
        self.told: dict[int, int] = {}
        self.ended: list[np.ndarray] = [np.zeros(0, np.int64)]
        self.found = 0

    def add(self, now: float) -> None:
        rng = self.rng
        before = self.ended[rng.integers(len(self.ended))]
        before = before[: rng.integers(24)]
        prompt = np.concatenate([before, rng.integers(0, 2, rng.integers(1, 8))])
        output, tier = int(rng.integers(1, 24)), Tier(int(rng.integers(2)))
        row = self.drive.add(
            len(prompt), output, arrival=now, tier=tier, keys=keys_of(prompt), ttft=5.0, tbt=2.0
        )
        self.tokens[row] = np.concatenate([prompt, rng.integers(0, 2, output)])
        self.told[row] = len(prompt)

    def step(self, now: float) -> None:
        drive, table = self.drive, self.drive.table
        waiting = table.in_state(WAITING)
        ends = len(drive.ended)
        planned = drive.step(now)
        started = [row for row in planned if row in waiting]
        for row in drive.ended[ends:]:
            self.ended.append(self.tokens.pop(row))
        for row in self.tokens:
            end = int(table.prompt_len[row] + table.received[row])
            new = keys_of(self.tokens[row][:end])[self.told[row] // SIZE :]
            self.told[row] = end
            drive.scheduler.know(row, new)
        self.found += len(started)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_all_are_served(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    host_slots = int(64 * rng.integers(3))
    options = {"blocks": 48, "block_size": SIZE, "rows": 6, "rho": 1e-6, "host_slots": host_slots}
    drive = Drive(policy, reuse=True, **options)
    traffic, now = Conversations(drive, rng), 0.0
    for _ in range(30):
        traffic.add(now)
        if rng.integers(2):
            traffic.step(now := now + 1.0)
    while drive.live:
        traffic.step(now := now + 1.0)
        assert now < 2000, f"{drive.live} have not ended"
    cache = drive.scheduler.cache
    assert cache is not None and cache.num_reused, "nothing was found"
    assert drive.pool.num_free == drive.pool.num_blocks and not drive.scheduler.host.num_used
