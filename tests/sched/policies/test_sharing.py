"""Every policy serves requests of which some read blocks that others have filled."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.sched.registry import deployable
from jaxserve.sched.request import Tier
from jaxserve.sched.state.request_table import RUNNING, WAITING
from tests.sched.driver import Drive

SIZE = 4  # tokens of a block
POLICIES = deployable()


def lend(drive: Drive, rng: np.random.Generator) -> int:
    """Somebody who waits reads the first full blocks of somebody of its tier who runs, as if they
    had been found. Returns how many blocks that are."""
    table, pool = drive.table, drive.pool
    running, waiting = table.in_state(RUNNING), table.in_state(WAITING)
    waiting = waiting[drive.scheduler.host.tokens[waiting] == 0]
    if not len(waiting) or not len(running) or len(running) >= drive.limits.max_rows:
        return 0
    row, source = rng.choice(waiting), rng.choice(running)
    known = int(table.prompt_len[row] + table.generated[row])
    blocks = min(int(table.computed[source]), known - 1) // SIZE
    if not blocks or table.tier[row] != table.tier[source]:
        return 0
    if pool.blocks_for(known) > pool.num_free:  # a start has room for all of its prompt
        return 0
    try:
        pool.share(source, row, blocks)
    except ValueError:  # some of it is on the host, or it lends an end
        return 0
    pool.grow(row, known)
    table.move(np.array([row]), RUNNING)
    table.computed[row] = blocks * SIZE
    return blocks


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", POLICIES)
def test_all_are_served(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drive = Drive(
        policy, blocks=48, block_size=SIZE, rows=6, rho=1e-6, host_slots=int(64 * rng.integers(3))
    )
    lent = 0
    for number in range(20):
        prompt, output = rng.integers(1, 28, 2).tolist()
        tier = Tier(int(rng.integers(2)))
        drive.add(prompt, output, arrival=float(number), tier=tier, ttft=5.0, tbt=2.0)
        if rng.integers(2):
            drive.step(float(number))
            lent += lend(drive, rng)
    now = 20.0
    while drive.live:
        drive.step(now)
        lent += lend(drive, rng)
        now += 1.0
        assert now < 2000, f"{drive.live} have not ended"
    assert lent, "nothing was shared"
    assert drive.pool.num_free == drive.pool.num_blocks and not drive.scheduler.host.num_used
