"""Chooses whether a simulation runs compiled (`compiled/`, with numba) or in Python
(`replica/event_loop.py`), which is the reference: if both can, the outcome is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.cost.cost_model import InferMaxCostModel, LinearCostModel
from jaxserve.sched.policy import Policy
from jaxserve.sched.unified.policy_spec import CompiledSpec, knows_the_seed
from jaxserve.sched.unified.unified_policy import UnifiedPolicy
from jaxserve.simulator.replica.event_loop import run_in_python
from jaxserve.simulator.settings import RunOptions, Served, Setting, TrafficOptions
from jaxserve.simulator.workloads.workload import Workload

COMPILING = "compiling the simulator's kernel, once: about half a minute"  # for commands to say

# Most requests for Python: serving them takes as long as loading numba and the code, about 0.7 s.
_FEW = 500
_MODULE = "jaxserve.simulator.compiled.run"
_served = 0

# A compiled spec does not cover overrides of these.
_METHODS = {"plan", "ranking", "expected", "candidates", "cut", "compiled_spec"}


class NotCompiled(ValueError):
    """A simulation cannot run compiled; the message says why in one line."""


def form_of(policy: Policy) -> CompiledSpec:
    """The policy's compiled spec. Raises NotCompiled if the policy does more than its spec says."""
    own = next((c for c in type(policy).__mro__ if _METHODS & vars(c).keys()), None)
    spec = None
    if policy.speculates:
        raise NotCompiled("drafts are not compiled")
    if isinstance(policy, UnifiedPolicy) and own is not None and "compiled_spec" in vars(own):
        spec = policy.compiled_spec()
    if spec is None:
        raise NotCompiled("the policy is more than settings of the unified scheduler")
    return spec


def has_form(policy: Policy) -> bool:
    """Whether the policy has a compiled spec that covers everything it does."""
    try:
        form_of(policy)
    except NotCompiled:
        return False
    return True


def run(
    policies: Sequence[Policy],
    workload: Workload,
    setting: Setting,
    traffic: TrafficOptions,
    options: RunOptions,
) -> Served:
    """Serves the workload, compiled or in Python.

    Args:
        policies: One per replica.
        workload: The requests.
        setting: Where they are served.
        traffic: Additional traffic, and when the run is cut off; in Python only.
        options: Execution options. compiled is True to insist on numba, False for Python, None for
        numba if possible and worth its start-up time.

    Raises:
        NotCompiled: `options.compiled` is True and the simulation cannot run compiled.
        InvalidPlan: A policy's plan cannot be booked, or it makes no progress.
    """
    if options.compiled or (options.compiled is None and _pays(workload)):
        try:
            return _run_compiled(policies[0], workload, setting, options)
        except NotCompiled:
            if options.compiled:
                raise
    return run_in_python(policies, workload, setting, traffic, options)


def _pays(workload: Workload) -> bool:
    """Whether loading the compiled code pays off, or it is loaded already."""
    global _served
    _served += len(workload)
    return _served > _FEW or _MODULE in sys.modules


def _run_compiled(
    policy: Policy, workload: Workload, setting: Setting, options: RunOptions
) -> Served:
    if workload.programs.closed:
        raise NotCompiled("calls of programs come as others end, which is not compiled")
    form = form_of(policy)
    assert isinstance(policy, UnifiedPolicy)
    # A derived class may override batch_time.
    if type(setting.cost_model) not in (LinearCostModel, InferMaxCostModel):
        raise NotCompiled("its cost model is none of the product's own")
    if setting.prefix_caching and setting.routing.finds:
        raise NotCompiled("its routers look at what is in prefix caches")
    if setting.prefix_caching and setting.retention != LRU:
        raise NotCompiled(f"retention {setting.retention} runs in Python only")
    if setting.prefix_caching and setting.host_slots:
        raise NotCompiled("host memory has what leaves its pool")
    if workload.adapter.any():
        raise NotCompiled("adapters are not compiled")
    seed_read = form.key is not None and knows_the_seed(form.key)
    try:
        from jaxserve.simulator.compiled import run
    except ImportError as error:
        raise NotCompiled(f"pip install numba ({error})") from error
    try:
        key = run.key_of(form)
    except run.NotCompilable as error:
        raise NotCompiled(f"numba does not compile the policy's key: {error}") from error
    served = run.run(
        policy,
        form,
        key,
        workload,
        setting,
        options.progress,
        options.compiling,
        reuse=setting.prefix_caching,
    )
    return replace(served, seed_read=seed_read or setting.routing.draws)
