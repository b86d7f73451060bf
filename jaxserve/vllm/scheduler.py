"""vLLM's scheduler with the choice of a policy: who computes how many tokens, and who makes room.

vLLM's `schedule` goes through its queues. Here it finds in them only what the policy has planned,
in that order, and takes no more tokens of each. All else is its own: blocks, prefix hits, drafts,
grammars, adapters, encoders and the output for the workers. If it has no blocks for a request, the
request is left out of this step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.online_cost_model import OnlineCostModel
from jaxserve.sched.cost.reachability import NOTHING
from jaxserve.sched.plan import BatchPlan, Preempt
from jaxserve.sched.policy import Limits
from jaxserve.sched.request import InvalidRequest, Request, SamplingParams
from jaxserve.sched.state.request_table import RUNNING
from jaxserve.sched.step_timing import HostTimes, StepWatch, Watched
from jaxserve.vllm.metrics import HOST_SECONDS, count
from jaxserve.vllm.mirror import Mirror
from jaxserve.vllm.settings import Settings, runnable, targets_of

TESTED = "0.32.0"
LEARNED = 32  # steps after which predictions are good enough to compare targets with
PRIOR = LinearCostModel(
    # Only ratios count until steps are measured: reading all weights takes as long as computing a
    # hundred tokens, reading a cached token a thousandth of computing one.
    Coefficients(
        per_token=1e-4,
        token_bias=1e-2,
        decode_kv=1e-7,
        decode_bias=0.0,
        per_decode=1e-5,
        prefill_quad=1e-8,
        prefill_bias=0.0,
        per_prefill=1e-5,
        prefill_m=1e-7,
    ),
    num_layers=1,
)
_NOTHING = BatchPlan()
_PLAN, _VLLM = HOST_SECONDS.labels("plan"), HOST_SECONDS.labels("vllm")
logger = logging.getLogger("vllm.jaxserve")  # vLLM shows its own loggers


class Planned(VllmScheduler):
    """vLLM's scheduler, steered. `Scheduler` makes one.

    Args:
        vllm_config, kv_cache_config: vLLM's; ValueError if they ask for what this cannot do.
        options: vLLM's other arguments.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, **options: Any) -> None:
        settings = Settings.read(vllm_config.additional_config)
        config = vllm_config.scheduler_config
        _check(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, **options)
        tokens = self.max_num_scheduled_tokens
        policy = runnable(
            settings.policy,
            chunked=config.enable_chunked_prefill,
            whole=tokens >= self.max_model_len,
        )
        self._costs = OnlineCostModel(PRIOR)
        self._watch = StepWatch(self._costs, None)
        self._mirror = Mirror(
            policy,
            Limits(tokens, tokens, self.max_num_active_reqs),
            self.kv_cache_manager,
            num_blocks=kv_cache_config.num_blocks - 1,  # vLLM keeps one for nobody's tokens
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            cost_model=self._costs,
        )
        self._settings, self._host = settings, HostTimes()
        self._flying: deque[Watched] = deque()  # steps whose tokens have not come
        self._most: dict[str, int] = {}  # by request, tokens that the plan in progress gives it
        self._failed = self._stuck = False
        logger.info("Steps are planned by jaxserve's policy %s.", settings.policy)

    def add_request(self, request: Any) -> None:
        """Adds a request with its targets. Wrong ones, which `Targets` refuses at the door, end it
        with an error."""
        known = request.request_id in self.requests  # more of a session's prompt
        super().add_request(request)
        if not known:
            self._enter(request)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        self._leave(session)  # each of its turns is a request of ours
        super()._update_request_as_session(session, update)
        self._enter(session)

    def _enter(self, request: Any) -> None:
        sampling, now = request.sampling_params, time.monotonic()
        try:
            slo, tier = targets_of(sampling.extra_args, self._settings)
        except InvalidRequest as error:
            logger.error("Request %s is refused: %s", request.request_id, error)
            slo, tier = targets_of(None, self._settings)
            self.grammar_compile_error_reqs.add(request.request_id)  # ends with the next step
        length = request.num_prompt_tokens
        limit = max(min(request.max_tokens, self.max_model_len - length), 1)
        ours = Request(
            request.request_id,
            (0,) * length,  # only their number counts
            SamplingParams(max_tokens=limit, temperature=float(sampling.temperature > 0)),
            slo,
            tier,
            arrival=now - max(time.time() - request.arrival_time, 0.0),
        )
        adapter = request.lora_request.lora_int_id if request.lora_request else 0
        learned = self._costs.steps >= LEARNED
        self._mirror.enter(ours, adapter=adapter, alone=None if learned else NOTHING)

    def _leave(self, request: Any) -> None:
        status = request.status
        failed = status == RequestStatus.FINISHED_ERROR
        complete = not failed and status != RequestStatus.FINISHED_ABORTED
        ended = self._mirror.leave(request, time.monotonic(), complete=complete, failed=failed)
        if ended is not None:
            count(*ended)

    def schedule(self, *args: Any, **options: Any) -> Any:
        """vLLM's own schedule, of what the policy plans. A step is left to vLLM if it is paused, if
        the policy has failed, or if nothing came of the step before."""
        begin = time.monotonic()
        plan = None
        if not (self._failed or self._stuck or self._pause_state != PauseState.UNPAUSED):
            plan = self._plan(begin)
        planned = time.monotonic()
        if plan is None:
            output = super().schedule(*args, **options)
        else:
            with self._only(plan):
                output = super().schedule(*args, **options)
        scheduled = time.monotonic()
        self._book(output, plan or _NOTHING)
        end = time.monotonic()
        if output.total_num_scheduled_tokens:
            _VLLM.observe(scheduled - planned)
            _PLAN.observe(end - begin - (scheduled - planned))
            self._mirror.view.device.host_gap_s = self._host.note(end - begin)
        return output

    def _plan(self, now: float) -> BatchPlan | None:
        """The policy's plan, with its preemptions carried out. None if it plans nothing."""
        for request in list(self.deferred_waiting):
            if self._is_blocked_waiting_status(request.status):
                self._handle_blocked_waiting_request(request)
        blocked = self._is_blocked_waiting_status
        waiting = [one for one in self.waiting if not blocked(one.status)]
        if not (waiting or self.running):
            return None
        gap = self._mirror.view.device.host_gap_s
        free_at = self._watch.free_at(*self._flying, host_gap_s=gap)
        try:
            self._mirror.follow(self.running, waiting)
            plan = self._mirror.plan(now, free_at, self._watch.overrun)
            for operation in plan.operations:
                self._make_room(operation, now)
        except Exception:
            self._failed = True
            name = self._settings.policy
            logger.exception("Policy %s has failed; from now on vLLM plans by itself.", name)
            return None
        return plan if len(plan) or self._flying else None

    def _make_room(self, operation: Any, now: float) -> None:
        if not isinstance(operation, Preempt):
            raise TypeError(f"vLLM has no {type(operation).__name__}")
        for row in operation.rows.tolist():  # vLLM keeps all of a cache or nothing
            request = self.requests[self._mirror.name(row)]
            self.running.remove(request)
            self._preempt_request(request, now)

    @contextmanager
    def _only(self, plan: BatchPlan) -> Iterator[None]:
        """Leaves only the plan's requests in vLLM's queues, in its order."""
        table, queue = self._mirror.table, self.waiting
        names = [self._mirror.name(row) for row in plan.rows.tolist()]
        runs = (table.state[plan.rows] == RUNNING).tolist()
        planned = [self.requests[name] for name in names]
        going = [one for one, goes_on in zip(planned, runs, strict=True) if goes_on]
        starts = [one for one, goes_on in zip(planned, runs, strict=True) if not goes_on]
        if self.lora_config:
            going, starts = self._with_few_adapters(going, starts)
        self._most = dict(zip(names, plan.num_tokens.tolist(), strict=True))
        chosen = {one.request_id for one in (*going, *starts)}
        rest = [one for one in self.running if one.request_id not in chosen]
        behind = [one for one in queue if one.request_id not in chosen]
        self.running: list[Any] = going
        queue.clear()
        queue.extend(starts)
        try:
            yield
        finally:
            self._most = {}
            self.running = [*self.running, *rest]
            queue.extend(behind)

    def _with_few_adapters(self, *parts: list[Any]) -> list[list[Any]]:
        """Leaves out requests with more adapters than a batch may have; vLLM's own plans never let
        so many run."""
        used: set[int] = set()
        found: list[list[Any]] = []
        for part in parts:
            found.append([])
            for request in part:
                own = {request.lora_request.lora_int_id} if request.lora_request else set()
                if len(used | own) <= self.lora_config.max_loras:
                    used |= own
                    found[-1].append(request)
        return found

    def _reserve_prefill_lookahead(self, request: Any, computed: int, tokens: int) -> int:
        """The last of vLLM's limits on a request's tokens, and so where the plan's comes in. Drafts
        behind all known tokens are vLLM's choice."""
        most = self._most.get(request.request_id)
        if most is not None:
            known = request.num_tokens + request.num_output_placeholders - computed
            if most < known:
                tokens = min(tokens, most)
        return int(super()._reserve_prefill_lookahead(request, computed, tokens))

    def _preempt_request(self, request: Any, *args: Any, **options: Any) -> None:
        super()._preempt_request(request, *args, **options)
        self._mirror.lose(request)

    def _book(self, output: Any, plan: BatchPlan) -> None:
        drafts = output.scheduled_spec_decode_tokens
        batch = [
            (self.requests[name], tokens, len(drafts.get(name, ())))
            for name, tokens in output.num_scheduled_tokens.items()
        ]
        idle = not (batch or self._flying)
        self._stuck = idle and bool(self.running or self.waiting)
        step = self._mirror.book_actual(batch, plan)
        if batch:
            self._flying.append(self._watch.launched(step, time.monotonic()))
            self._mirror.release_finished(step)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, and notes what came when."""
        now = time.monotonic()
        if scheduler_output.total_num_scheduled_tokens:
            self._watch.finished(self._flying.popleft(), now)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        names = scheduler_output.num_scheduled_tokens
        self._mirror.take([self.requests[one] for one in names if one in self.requests], now)
        return outputs

    def _free_request(self, request: Any, *args: Any, **options: Any) -> Any:
        self._leave(request)
        return super()._free_request(request, *args, **options)


class PlannedAsync(Planned, VllmAsyncScheduler):
    """The same with a step planned while the one before runs; see `Planned`."""


def Scheduler(vllm_config: Any, **options: Any) -> Planned:
    """For `--scheduler-cls jaxserve.vllm.Scheduler`: the scheduler of an engine, asynchronous or
    not as vLLM has decided. ValueError if vLLM or its settings are not what this can do.

    Args:
        vllm_config: vLLM's.
        options: vLLM's other arguments.
    """
    made = PlannedAsync if vllm_config.scheduler_config.async_scheduling else Planned
    return made(vllm_config, **options)


def _check(vllm_config: Any, kv_cache_config: Any) -> None:
    """ValueError names the first setting that rules this scheduler out."""
    if not hasattr(VllmScheduler, "_reserve_prefill_lookahead"):
        raise ValueError(f"jaxserve.vllm was written for vLLM {TESTED}; this one is too different")
    parallel, groups = vllm_config.parallel_config, kv_cache_config.kv_cache_groups
    plain = len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
    wrong = {
        "--scheduling-policy: the policy is jaxserve's": vllm_config.scheduler_config.policy
        != SchedulingPolicy.FCFS.value,
        "--kv-transfer-config: blocks come and go beside the plan": vllm_config.kv_transfer_config
        is not None,
        "--pipeline-parallel-size above 1": parallel.pipeline_parallel_size > 1,
        "models that do not generate text": vllm_config.model_config.runner_type != "generate"
        or vllm_config.model_config.is_diffusion,
        "encoder-decoder models": vllm_config.model_config.is_encoder_decoder,
        "models with windows or states (for windows, --disable-hybrid-kv-cache-manager may help)": (
            not plain
        ),
    }
    for what, there in wrong.items():
        if there:
            raise ValueError(f"jaxserve.vllm.Scheduler does not support {what}")
