"""The engine without a model, which says what there is before it, too."""

from __future__ import annotations

import time

from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy
from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.slo.backlog import Backlog
from tests.cost_models import FLAT
from tests.server.fake_engine import INFO, FakeEngine


class Engine(FakeEngine):
    """One that never has anything before it, as far as it says."""

    def backlog(self) -> Backlog:
        scheduler = Scheduler(
            make_policy("sarathi"),
            Limits(512, 512, 16),
            num_blocks=INFO.num_blocks,
            block_size=INFO.block_size,
            max_model_len=INFO.max_model_len,
            capacity=4,
            cost_model=FLAT,
        )
        return Backlog.from_scheduler(scheduler, time.monotonic(), 0.0)
