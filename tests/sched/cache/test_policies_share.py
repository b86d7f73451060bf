"""Every policy serves requests of which some read blocks that others have filled."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.registry import RETENTIONS, deployable, make_policy
from jaxserve.sched.request import Tier
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from tests.cost_models import FLAT
from tests.sched.cache.device_contents import DeviceContents
from tests.sched.cache.invariants import check_host, check_host_pages, check_pool
from tests.sched.driver import Drive

SIZE = 4  # tokens of a block
MOST = 63  # tokens of a request
POLICIES = deployable()
DEEP_PAY = LinearCostModel(
    Coefficients(1e-4, 1e-3, 0, 0, 0, 2e-5, 0, 0, 0, swapped_slot=4e-4), num_layers=1
)
"""Copies to the host and back pay for blocks that have two others before them."""


def keys_of(tokens: np.ndarray) -> tuple[bytes, ...]:
    """Of the full blocks of these tokens: all tokens up to the end of each."""
    return tuple(tokens[:end].tobytes() for end in range(SIZE, len(tokens) + 1, SIZE))


class Conversations:
    """An engine's loop around the scheduler: tokens arrive a step late, some requests are
    cancelled, and prompts repeat what others have read or written. All find in the pool what they
    expect there."""

    def __init__(self, policy: str, rng: np.random.Generator, *, tight: bool = False) -> None:
        blocks, rows = 2 * int(rng.integers(16, 30)), int(rng.integers(2, 9))
        blocks = 2 * -(-MOST // SIZE) if tight else blocks
        slots = int(64 * rng.integers(3))
        options = {"blocks": blocks, "block_size": SIZE, "rows": rows, "host_slots": slots}
        options["cost_model"] = FLAT if rng.integers(2) else DEEP_PAY
        options["retention"] = str(rng.choice([*RETENTIONS]))
        self.drive = Drive(policy, prefix_caching=True, rho=1e-6, **options)
        self.device = DeviceContents(blocks, SIZE)
        self.rng, self.now, (self.whose,) = rng, 0.0, rng.spawn(1)
        self.tokens: dict[int, np.ndarray] = {}  # by row
        self.told: dict[int, int] = {}
        self.ended = [np.zeros(0, np.int64)]
        self.late: deque[list[tuple[int, int]]] = deque()  # rows and seqs of tokens on their way

    def add(self) -> None:
        rng, others = self.rng, self.ended if self.rng.integers(2) else [*self.tokens.values()]
        before = others[rng.integers(len(others))][: rng.integers(40)] if others else self.ended[0]
        prompt = np.concatenate([before, rng.integers(0, 2, rng.integers(1, 12))])[: MOST - 2]
        output, tier = int(min(rng.integers(1, 40), MOST - len(prompt))), int(rng.integers(2))
        own = {"tier": Tier(tier), "keys": keys_of(prompt), "ttft": 5.0, "tbt": 2.0}
        weight = float(self.whose.integers(1, 4))
        own |= {"tenant": f"of weight {weight}", "weight": weight}  # who find what others have
        row = self.drive.add(len(prompt), output, arrival=self.now, **own)
        self.tokens[row] = np.concatenate([prompt, rng.integers(0, 2, output)])
        self.told[row] = len(prompt)

    def step(self) -> bool:
        """Whether anything was planned."""
        scheduler, table = self.drive.scheduler, self.drive.table
        step = scheduler.schedule(self.now)
        self.drive._mirror.follow(step)
        self.device.run(step, self.drive.pool, self.tokens)
        scheduler.release_finished(step)
        self.late.append([(row, int(table.seq[row])) for row in step.emitting.tolist()])
        if len(self.late) > 1 or not len(step.rows):
            self.receive()
        if self.tokens and self.rng.random() < 0.08:
            self.finish(int(self.rng.choice(sorted(self.tokens))), complete=False)
        check_pool(self.drive.pool)
        check_host(scheduler.host)
        assert scheduler.cache is not None
        check_host_pages(scheduler.cache, scheduler.host, SIZE)
        self.now += 1.0
        return bool(len(step.rows))

    def receive(self) -> None:
        table = self.drive.table
        for row, seq in self.late.popleft():
            if row not in self.tokens or table.seq[row] != seq:
                continue
            self.drive.scheduler.receive(np.array([row]), self.now)
            end = int(table.prompt_len[row] + table.received[row])
            new = keys_of(self.tokens[row][:end])[self.told[row] // SIZE :]
            self.told[row] = end
            self.drive.scheduler.know(row, new)
            if table.received[row] == table.max_tokens[row]:
                self.finish(row, complete=True)

    def finish(self, row: int, *, complete: bool) -> None:
        self.drive.scheduler.finish(row, complete=complete)
        self.ended.append(self.tokens.pop(row))


SEEDS = range(3)
# With code of their own, and of those that are settings of the unified scheduler one of each kind.
OWN = [name for name in POLICIES if not isinstance(make_policy(name), UnifiedPolicy)]
KINDS = [*OWN, "sarathi", "vllm", "infermax", "fastgen", "edf"]


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        pytest.param(policy, seed, marks=[] if seed == i % len(SEEDS) else [pytest.mark.slow])
        for i, policy in enumerate(KINDS)
        for seed in SEEDS
    ],
)
def test_all_are_served(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    traffic, left, rate, idle = Conversations(policy, rng), 40, rng.uniform(0.3, 1.5), 0
    while left or traffic.tokens:
        for _ in range(min(rng.poisson(rate), left)):
            traffic.add()
            left -= 1
        idle = 0 if traffic.step() else idle + 1
        assert idle < 50, f"{len(traffic.tokens)} have not ended, and nothing is planned"
    scheduler = traffic.drive.scheduler
    assert scheduler.cache is not None and scheduler.cache.num_reused, "nothing was found"
    second = scheduler.cache.host is not None
    assert second == bool(scheduler.host.capacity and policy != "bros")
    assert second == bool(scheduler.cache.num_host_hit.sum()), "in host memory"
    assert scheduler.is_empty
    scheduler.forget_all()
    traffic.device.run(scheduler.book(BatchPlan()), traffic.drive.pool, {})
    assert not traffic.device.host
    check_pool(traffic.drive.pool)


@pytest.mark.promise(38)
@pytest.mark.parametrize("policy", POLICIES)
def test_all_end_where_the_pool_just_holds_one(policy: str) -> None:
    """In steps that are counted: of real-time and best-effort requests that find each other's
    blocks, some of which are as long as the pool, and some cancelled. What could be found is
    forgotten twice meanwhile, as `POST /reset_prefix_cache` has it."""
    traffic, steps, idle = Conversations(policy, np.random.default_rng(7), tight=True), 0, 0
    scheduler = traffic.drive.scheduler
    for _ in range(16):
        traffic.add()
    while traffic.tokens:
        steps, idle = steps + 1, 0 if traffic.step() else idle + 1
        if steps in (6, 20):
            scheduler.forget_all()
        assert idle < 50, f"{len(traffic.tokens)} have not ended, and nothing is planned"
        assert steps < 4000, "16 requests of 63 tokens, each of them computed four times"
    assert scheduler.is_empty and len(traffic.ended) == 17
