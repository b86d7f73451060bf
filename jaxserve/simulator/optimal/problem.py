"""The input of `solve`, and bounds on the size of its program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.sched.cost.cost_model import InferMaxCostModel, LinearCostModel
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.policy import Limits, Policy
from jaxserve.simulator.optimal.cost import ScaledCost
from jaxserve.simulator.optimal.replay import Replay, Schedule, replay, run
from jaxserve.simulator.workloads.workload import Workload

OBJECTIVES = ("latency", "mean_ttft", "makespan")
MAX_LITERALS = 400_000


class OptimalError(ValueError):
    """A problem that is malformed or too large; the message says why."""


@dataclass(frozen=True)
class Problem:
    """A scheduling problem: what to schedule, within which limits, and what to minimise.

    Attributes:
        workload: The requests, all greedy.
        cost_model: The cost of batches.
        kv_tokens: M.
        max_batch_tokens: C.
        max_prefill_tokens: P, tokens of a batch that may belong to prefills; 0 for C.
        block_size: Tokens of a block.
        chunked: Whether prompts may be computed in parts.
        objective: In seconds. `latency` is the sum of the batch times; `makespan` the end of the
            last batch, including waits for arrivals; `mean_ttft` the mean time from arrival to
            first token.

    Raises:
        OptimalError: The workload cannot be served within the limits, or the cost model has
            experts, whose times are not linear in what a batch has.
    """

    workload: Workload
    cost_model: LinearCostModel | InferMaxCostModel
    kv_tokens: int
    max_batch_tokens: int
    max_prefill_tokens: int = 0
    block_size: int = 1
    chunked: bool = True
    objective: str = "latency"

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise OptimalError(f"objective must be one of {', '.join(OBJECTIVES)}")
        model = self.cost_model
        linear = model.linear if isinstance(model, InferMaxCostModel) else model
        if linear.num_experts:
            raise OptimalError(
                f"cost_model has {linear.num_experts} experts; only models without are supported"
            )
        if self.workload.programs.closed:
            raise OptimalError(
                "calls of programs come when others have ended: arrivals must be known"
            )
        for name in ("kv_tokens", "max_batch_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise OptimalError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.max_prefill_tokens <= self.max_batch_tokens:
            raise OptimalError(
                f"max_prefill_tokens must be 0 to {self.max_batch_tokens}, "
                f"got {self.max_prefill_tokens}"
            )
        if not self.workload.greedy.all():
            raise OptimalError("optimal schedules are of requests that are all greedy")
        peak = self.workload.prompt_len + self.workload.output_len - 1
        capacity = self.kv_tokens // self.block_size * self.block_size
        if peak.max() > capacity:
            raise OptimalError(
                f"request {peak.argmax()} needs {peak.max()} tokens of cache, there are {capacity}"
            )
        longest = self.workload.prompt_len.max()
        if not self.chunked and longest > self.prefill_tokens:
            raise OptimalError(
                f"request {self.workload.prompt_len.argmax()} has a prompt of {longest} tokens, "
                f"which may not be cut; a batch takes {self.prefill_tokens}"
            )

    @property
    def prefill_tokens(self) -> int:
        """P, the tokens of a batch that may belong to prefills, with the default resolved."""
        return self.max_prefill_tokens or self.max_batch_tokens

    @property
    def limits(self) -> Limits:
        """C, P, and as many rows as there are requests."""
        rows = len(self.workload)
        return Limits(self.max_batch_tokens, self.prefill_tokens, rows)

    def value(self, played: Replay) -> float:
        """The objective of a replayed schedule, seconds."""
        return float(getattr(played, self.objective))

    def play(self, schedule: Schedule) -> Replay:
        """Replays a schedule within the limits. Raises InvalidPlan or ReplayError if it breaks
        one."""
        played = replay(schedule, self.workload, self.cost_model, **self._where())
        prefill = np.where(played.decoding, 0, schedule.tokens)
        if prefill.sum(axis=1).max() > self.prefill_tokens:
            raise InvalidPlan("more prefill tokens than max_prefill_tokens")
        if not self.chunked and (played.kv[prefill > 0] < self._known(played)[prefill > 0]).any():
            raise InvalidPlan("a prompt is cut")
        return played

    def record(self, policy: Policy) -> Schedule:
        """The schedule of a policy for the workload. Raises InvalidPlan if it breaks a limit,
        ReplayError if it stops too early."""
        return run(policy, self.workload, self.cost_model, **self._where()).schedule

    def _where(self) -> dict[str, Any]:
        size = {"kv_tokens": self.kv_tokens, "block_size": self.block_size}
        return {"limits": self.limits, **size}

    def _known(self, played: Replay) -> np.ndarray:
        """Tokens that each request has before each batch, [b, n]; a batch after which all of them
        are cached adds one."""
        known = np.empty_like(played.kv)
        now = self.workload.prompt_len.copy()
        for j, cached in enumerate(played.kv):
            known[j] = now
            now = now + ((played.schedule.tokens[j] > 0) & (cached == now))
        return known


def enough_batches(problem: Problem, cost: ScaledCost, target: float) -> int:
    """No schedule with an objective of at most `target` seconds needs more batches than this.

    Every batch of whole prompts writes a token. With chunks, every batch takes its fixed time, and
    every prompt and output its own; for a mean TTFT this bounds only the batches up to the last
    first token, but the rest can then be done one request at a time.
    """
    workload, k = problem.workload, cost.coefficients
    prompt, output = workload.prompt_len, workload.output_len
    fixed = cost.least(0)
    if problem.objective == "mean_ttft":
        latest = target * len(workload) + float(workload.arrival.max())
        refill = -(-(prompt + output - 1) // problem.prefill_tokens)
        by_time = latest / cost.unit / fixed + float((output - 1 + refill).sum())
    else:
        work = k["per_token"] * int((prompt + output - 1).sum())
        work += k["prefill_quad"] * int((prompt**2).sum())
        by_time = (target * (1 + cost.error) / cost.unit - work) / fixed
    whole = int(output.sum()) if not problem.chunked else math.inf
    return max(int(min(by_time + 1, whole)), int(output.max()))


def longest_batch(problem: Problem, cost: ScaledCost) -> int:
    """Most units of time that a batch within the limits takes."""
    k, n = cost.coefficients, len(problem.workload)
    tokens = min(problem.max_batch_tokens, problem.kv_tokens)
    longest = int((problem.workload.prompt_len + problem.workload.output_len).max())
    time = k["token_bias"] + k["batch_bias"] + k["per_token"] * tokens
    time += cost.residuals(-(-tokens // 8))
    attention = k["decode_bias"] + k["decode_kv"] * problem.kv_tokens
    attention += k["prefill_bias"] + k["prefill_m"] * problem.kv_tokens
    attention += k["prefill_quad"] * n * longest**2
    return time + 2 * attention + n * (k["per_decode"] + k["per_prefill"])


def check_size(workload: Workload, batches: int, chunked: bool) -> None:
    """Raises OptimalError if the program would have more than MAX_LITERALS literals."""
    literals = int(workload.output_len.sum()) * batches * (6 if chunked else 4)
    if literals > MAX_LITERALS:
        raise OptimalError(
            f"{len(workload)} requests and {batches} batches make about {literals} literals, "
            f"limit {MAX_LITERALS}; optimal schedules are for small workloads"
        )
