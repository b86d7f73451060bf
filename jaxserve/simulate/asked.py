"""The runs that the flags ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxserve import workload_flags
from jaxserve.sched.registry import make_policy
from jaxserve.sched.workloads.specs import WorkloadSpec
from jaxserve.simulate import flags, output, routing_flags
from jaxserve.simulate.runs import Run, Source


def specs(args: argparse.Namespace) -> list[WorkloadSpec]:
    """One a rate."""
    asked = workload_flags.options(args)
    return [
        WorkloadSpec(
            args.workload,
            args.num_requests,
            args.arrivals,
            rate,
            args.cv,
            args.on_s,
            args.off_s,
            duration=args.duration,
            best_effort=args.best_effort,
            **asked,
        )
        for rate in args.rate or [None]
    ]


def runs(args: argparse.Namespace, sources: Sequence[Source]) -> list[Run]:
    """One a policy and source, with the first seed. What is wrong with any is said before anything
    runs."""
    found = [
        Run(
            policy,
            args.system or flags.SYSTEM,
            spec,
            args.rules,
            args.kv_tokens,
            args.host_tokens,
            args.block_size,
            args.max_batch_tokens,
            args.max_prefill_tokens,
            args.max_rows,
            args.replicas,
            routing_flags.routing(args),
            args.seed,
            keep=output.keeps(args),
            record_rows=output.records_rows(args),
            hidden_read=args.hidden_read,
            max_queue=args.max_queue,
            refuse_late=args.refuse_late,
        )
        for policy in args.policy
        for spec in sources
    ]
    for run in found:
        run.limits()
    if args.max_prefill_tokens and not any(make_policy(name).chunked for name in args.policy):
        raise ValueError("--max_prefill_tokens is for policies that compute prompts in chunks")
    return found
