r"""Simulates serving: no device, no weights, minutes in seconds.

    python -m jaxserve.simulate --policy=vllm --system=llama-2-7b@a100 \
        --workload=fixed:1024x128x32 --kv_tokens=100000 --max_batch_tokens=4096 --json
    python -m jaxserve.simulate --policy=vllm,sarathi,edf --workload=sharegpt --rate=2,4,6,8 \
        --slo_ttft_ms=1000 --slo_tbt_ms=100 --plots=figures
    python -m jaxserve.simulate --policy=edf,sarathi:watermark=0.05 --workload=sharegpt --rate=8 \
        --classes=chat:0.7:ttft=500ms:tbt=50ms,batch:0.3:tier=best_effort:jct=60s
    python -m jaxserve.simulate --policy=sarathi --workload=AzureLLMInferenceTrace_conv.csv

--workload: fixed:IxOxB, a mix (lilo+siso), a data set's name, or a trace's path: a CSV of
prompt_tokens,output_tokens, Azure's or BurstGPT's CSV, Mooncake's JSONL; a trace may say what each
request asks for, in columns max_tokens, tier, ttft_ms, tbt_ms, jct_ms, class and greedy (true, or
false for one that is sampled). Several policies and rates, separated by commas, run beside each
other on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from jaxserve import workload_flags
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation import simulator
from jaxserve.sched.simulation.hardware import HIDDEN_READS
from jaxserve.sched.workloads.specs import ARRIVALS, WorkloadSpec
from jaxserve.simulate import output
from jaxserve.simulate.report import report
from jaxserve.simulate.runs import REFUSED, Run, results
from jaxserve.workload_flags import positive_int


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 for what cannot be simulated, 2 for a wrong command line."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        runs = _runs(args)
        summaries, kept = [], []
        for run, summary, result in results(runs, args.jobs, keep=output.keeps(args)):
            summaries.append(summary)
            if result is not None:
                kept.append((output.label(run, runs), result))
        output.write(args, summaries, kept)
    except REFUSED as error:
        print(f"jaxserve.simulate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(report(summaries), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        sys.stderr.flush()
        last = summaries[0] if len(summaries) == 1 else {"runs": summaries}
        print(json.dumps(last, allow_nan=False), flush=True)
    return 0


def _runs(args: argparse.Namespace) -> list[Run]:
    rates, asked = args.rate or [None], workload_flags.options(args)
    specs = [
        WorkloadSpec(
            args.workload,
            args.num_requests,
            args.arrivals,
            rate,
            args.cv,
            args.on_s,
            args.off_s,
            **asked,
        )
        for rate in rates
    ]
    for policy in args.policy:
        make_policy(policy)  # an unknown name is said before anything runs
    return [
        Run(
            policy,
            args.system,
            spec,
            args.rules,
            args.kv_tokens,
            args.host_tokens,
            args.block_size,
            args.max_batch_tokens,
            args.max_prefill_tokens,
            args.max_rows,
            args.replicas,
            args.routing,
            args.seed,
            record_rows="schedule" in (args.views or ()),
            hidden_read=args.hidden_read,
            max_queue=args.max_queue,
        )
        for policy in args.policy
        for spec in specs
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--policy",
        type=_names,
        default=["sarathi"],
        help="names, separated by commas, with parameters: edf:watermark=0.05 (sarathi)",
    )
    add("--system", default="llama-2-7b@a100", help="preset, MODEL@DEVICE or profile.json")
    add("--hidden_read", choices=HIDDEN_READS, default="auto", help="of MODEL@DEVICE (auto)")
    add("--workload", required=True, help="see above")
    add("--num_requests", type=positive_int, help="of a sampler (1000), or the first of a trace")
    add("--arrivals", choices=ARRIVALS, help="(the trace's; else poisson with --rate, else all)")
    add("--rate", type=_rates, help="requests/s, several separated by commas")
    add("--cv", type=float, help="of gamma arrivals: deviation of the gaps over their mean")
    add("--on_s", type=float, help="of on_off arrivals: mean seconds on")
    add("--off_s", type=float, help="of on_off arrivals: mean seconds off")
    add("--rules", choices=tuple(simulator.RULES), default="jaxserve", help="whose accounting")
    add("--kv_tokens", type=positive_int, help="M, tokens of KV cache (the system's)")
    add("--host_tokens", type=positive_int, default=0, help="of checkpoints on the host (0)")
    add("--block_size", type=positive_int, help="tokens of a block (16; infermax_paper: 1)")
    add("--max_batch_tokens", type=positive_int, help="C (the system's)")
    add("--max_prefill_tokens", type=positive_int, help="P (512 where prompts are chunked, else C)")
    add("--max_rows", type=positive_int, help="requests of a batch (no limit)")
    add("--max_queue", type=int, help="unfinished requests beside max_rows; refuse more (no limit)")
    add("--replicas", type=positive_int, default=1, help="(1)")
    add("--routing", choices=tuple(simulator.ROUTERS), default="round_robin")
    workload_flags.add_flags(
        parser,
        "a number; 'length', what each writes (by default as much as the longest request leaves)",
    )
    add("--seed", type=int, default=0, help="of workloads and policies (0)")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (all cores)")
    add("--json", action="store_true", help="one JSON object as the last line")
    add("--requests_table", metavar="PATH", help="a row a request, .csv or .json")
    add("--batches_table", metavar="PATH", help="a row a batch, .csv or .json")
    add("--plots", metavar="DIR", help="figures, as PNG")
    add(
        "--views",
        type=_names,
        help="which figures: attainment,cdf,kv,schedule (the first three; schedule, requests x "
        "batches, is for small runs)",
    )
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _rates(text: str) -> list[float]:
    return [float(rate) for rate in text.split(",")]
