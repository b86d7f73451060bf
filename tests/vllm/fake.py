"""What jaxserve.vllm uses of vLLM, small: queues, blocks that run short, and steps with no model.

`tools/vllm_cpu/check_scheduler.py` does the same with vLLM itself.
"""

from __future__ import annotations

import enum
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

BLOCK = 4


class RequestStatus(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


class PauseState(enum.Enum):
    UNPAUSED = 0
    PAUSED_ALL = 1


class SchedulingPolicy(enum.Enum):
    FCFS = "fcfs"


class FullAttentionSpec:
    pass


class Request:
    def __init__(self, name: str, length: int, most: int, *, adapter: int = 0, **said: Any) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, length, most
        self.sampling_params = SimpleNamespace(extra_args=said, temperature=0.0)
        self.lora_request = SimpleNamespace(lora_int_id=adapter) if adapter else None
        self.arrival_time = time.time()
        self.num_output_tokens = self.num_output_placeholders = self.num_computed_tokens = 0
        self.status, self.grammar_is_ready = RequestStatus.WAITING, True

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Manager:
    """Blocks without a prefix cache."""

    def __init__(self, blocks: int) -> None:
        self.free_blocks, self.held = blocks, dict[str, list[Any]]()
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks)

    def get_blocks(self, name: str) -> Any:
        return SimpleNamespace(blocks=(self.held.get(name, []),))

    def get_computed_blocks(self, request: Request) -> tuple[Any, int, int]:
        return SimpleNamespace(blocks=([],)), 0, 0

    def allocate(self, request: Request, tokens: int) -> bool:
        mine = self.held.setdefault(request.request_id, [])
        more = max(-(-(request.num_computed_tokens + tokens) // BLOCK) - len(mine), 0)
        if more > self.free_blocks:
            return False
        mine += [SimpleNamespace(ref_cnt=1) for _ in range(more)]
        self.free_blocks -= more
        return True

    def free(self, request: Request) -> None:
        self.free_blocks += len(self.held.pop(request.request_id, []))


class Scheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        config = vllm_config.scheduler_config
        self.max_num_scheduled_tokens = config.max_num_batched_tokens
        self.max_num_active_reqs, self.max_model_len = config.max_num_seqs, 64
        self.block_size, self.lora_config = BLOCK, vllm_config.lora_config
        self.kv_cache_manager = Manager(kv_cache_config.num_blocks - 1)
        self.requests = dict[str, Request]()
        self.running, self.waiting = list[Request](), deque[Request]()
        self.deferred_waiting, self.grammar_compile_error_reqs = set[Request](), set[str]()
        self._pause_state = PauseState.UNPAUSED

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if self._is_blocked_waiting_status(request.status):
            self.deferred_waiting.add(request)

    def _update_request_as_session(self, session: Request, more: int) -> None:
        session.num_prompt_tokens += session.num_output_tokens + more
        session.num_output_tokens = 0

    @staticmethod
    def _is_blocked_waiting_status(status: RequestStatus) -> bool:
        return status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if request.grammar_is_ready:
            request.status = RequestStatus.WAITING
        return request.grammar_is_ready

    def _reserve_prefill_lookahead(self, request: Request, computed: int, tokens: int) -> int:
        return tokens

    def _preempt_request(self, request: Request, now: float) -> None:
        self.kv_cache_manager.free(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.waiting.appendleft(request)

    def _wanted(self, request: Request, budget: int) -> int:
        pending = request.num_tokens - request.num_computed_tokens
        done = request.num_computed_tokens
        return self._reserve_prefill_lookahead(request, done, min(pending, budget))

    def schedule(self) -> Any:
        paused = self._pause_state == PauseState.PAUSED_ALL
        budget = 0 if paused else self.max_num_scheduled_tokens
        counts, preempts, manager = dict[str, int](), False, self.kv_cache_manager
        for request in list(self.running):
            if request.status != RequestStatus.RUNNING:
                continue  # it has made room for one before it
            tokens = self._wanted(request, budget)
            if not tokens:
                continue
            while not (fits := manager.allocate(request, tokens)):
                last, preempts = self.running.pop(), True
                self._preempt_request(last, 0.0)
                if last is request:
                    break
            if not fits:
                break
            counts[request.request_id] = tokens
            budget -= tokens
        while self.waiting and budget and not preempts:
            request = self.waiting[0]
            blocked = self._is_blocked_waiting_status(request.status)
            if blocked and not self._handle_blocked_waiting_request(request):
                break
            tokens = self._wanted(request, budget)
            full = len(self.running) >= self.max_num_active_reqs
            if full or not tokens or not manager.allocate(request, tokens):
                break
            self.running.append(self.waiting.popleft())
            self.deferred_waiting.discard(request)
            request.status = RequestStatus.RUNNING
            counts[request.request_id] = tokens
            budget -= tokens
        if self.lora_config:
            loras = [self.requests[name].lora_request for name in counts]
            assert len({one.lora_int_id for one in loras if one}) <= self.lora_config.max_loras
        for name, tokens in counts.items():
            self.requests[name].num_computed_tokens += tokens
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens={},
        )

    def update_from_output(self, output: Any, _: Any) -> None:
        for name in output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is None or request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self.finish_requests(name, RequestStatus.FINISHED_LENGTH_CAPPED)
        for name in self.grammar_compile_error_reqs & self.requests.keys():
            self.finish_requests(name, RequestStatus.FINISHED_ERROR)

    def finish_requests(self, name: str, status: RequestStatus) -> None:
        request = self.requests[name]
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = status
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]


class AsyncScheduler(Scheduler):
    pass


class LogitsProcessor:
    pass


@contextmanager
def installed() -> Iterator[None]:
    """Lets `import vllm` find these."""
    core = "vllm.v1.core.sched"
    found = {
        f"{core}.async_scheduler": AsyncScheduler,
        f"{core}.interface": PauseState,
        f"{core}.request_queue": SchedulingPolicy,
        f"{core}.scheduler": Scheduler,
        "vllm.v1.kv_cache_interface": FullAttentionSpec,
        "vllm.v1.request": RequestStatus,
        "vllm.v1.sample.logits_processor": LogitsProcessor,
    }
    ours = ("jaxserve.vllm.scheduler", "jaxserve.vllm.request_check")
    for name, thing in found.items():
        module = sys.modules[name] = ModuleType(name)
        setattr(module, thing.__name__, thing)
        while name := name.rpartition(".")[0]:
            sys.modules.setdefault(name, ModuleType(name))
    try:
        yield
    finally:
        for name in [one for one in sys.modules if one.split(".")[0] == "vllm"]:
            del sys.modules[name]
        for name in ours:
            sys.modules.pop(name, None)


def configs(
    policy: str, *, blocks: int = 12, tokens: int = 8, rows: int = 4, **changes: Any
) -> tuple[Any, Any]:
    """vLLM's config and that of its KV cache. changes: of the former."""
    scheduler = SimpleNamespace(
        max_num_batched_tokens=tokens,
        max_num_seqs=rows,
        policy="fcfs",
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    model = {"runner_type": "generate", "is_diffusion": False, "is_encoder_decoder": False}
    values = {
        "scheduler_config": scheduler,
        "model_config": SimpleNamespace(**model),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "additional_config": {"jaxserve": {"policy": policy}},
        "kv_transfer_config": None,
        "lora_config": None,
        **changes,
    }
    group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
    return SimpleNamespace(**values), SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group])
