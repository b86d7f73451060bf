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
request asks for, in columns max_tokens, tier, ttft_ms, tbt_ms, jct_ms and class. Several policies
and rates, separated by commas, run beside each other on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxserve import workload_flags
from jaxserve.group_table import aligned, group_lines
from jaxserve.sched.plan import InvalidPlan
from jaxserve.sched.registry import make_policy
from jaxserve.sched.simulation import simulator
from jaxserve.sched.simulation.hardware import HIDDEN_READS
from jaxserve.sched.simulation.results import SimulationResult, write_table
from jaxserve.sched.simulation.systems import system
from jaxserve.sched.workloads.specs import ARRIVALS, WorkloadSpec
from jaxserve.workload_flags import positive_int

REFUSED = (ValueError, InvalidPlan, OSError)


@dataclass(frozen=True)
class Run:
    """One simulation: a policy on a workload. Holds only what can go to another process."""

    policy: str
    system: str
    workload: WorkloadSpec
    rules: str
    kv_tokens: int | None
    host_tokens: int
    block_size: int | None
    max_batch_tokens: int | None
    max_prefill_tokens: int | None
    max_rows: int | None
    replicas: int
    routing: str
    seed: int
    record_rows: bool
    hidden_read: str = "auto"
    max_queue: int | None = None

    def result(self, bar: tqdm | None = None) -> SimulationResult:
        """Raises one of REFUSED."""
        place = system(self.system, self.hidden_read)
        workload = self.workload.make(self.seed)
        limits = simulator.default_limits(
            make_policy(self.policy),
            place,
            max_batch_tokens=self.max_batch_tokens,
            max_prefill_tokens=self.max_prefill_tokens,
            max_rows=self.max_rows,
        )
        if bar is not None:
            bar.reset(len(workload))
        return simulator.simulate(
            self.policy,
            workload,
            place,
            limits=limits,
            kv_tokens=self.kv_tokens,
            host_tokens=self.host_tokens,
            block_size=self.block_size,
            rules=self.rules,
            replicas=self.replicas,
            routing=self.routing,
            max_queue=self.max_queue,
            seed=self.seed,
            record_rows=self.record_rows,
            progress=None if bar is None else bar.update,
        )

    def summary(self, result: SimulationResult) -> dict[str, Any]:
        """What was run, and its numbers."""
        return {
            "policy": self.policy,
            "rate": self.workload.rate,
            "system": self.system,
            "workload": self.workload.lengths,
            "rules": self.rules,
            "replicas": self.replicas,
            "kv_tokens": result.kv_tokens,
            "seed": self.seed,
            **result.summary(),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 for what cannot be simulated, 2 for a wrong command line."""
    args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        runs = _runs(args)
        summaries, results = [], []
        for run, summary, result in _results(runs, args.jobs, keep=_keeps(args)):
            summaries.append(summary)
            if result is not None:
                results.append((_label(run, runs), result))
        _write(args, summaries, results)
    except REFUSED as error:
        print(f"jaxserve.simulate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(_report(summaries), file=sys.stderr if args.json else sys.stdout)
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


def _results(
    runs: list[Run], jobs: int, keep: bool
) -> Iterator[tuple[Run, dict[str, Any], SimulationResult | None]]:
    """Every run with its summary, in order; with its result if that is to be kept."""
    quiet = not sys.stderr.isatty()
    if len(runs) == 1 or jobs == 1:
        for run in runs:
            with tqdm(desc=run.policy, unit="request", disable=quiet, leave=False) as bar:
                result = run.result(bar)
            yield run, run.summary(result), result if keep else None
        return
    with (
        ProcessPoolExecutor(min(jobs, len(runs)), multiprocessing.get_context("spawn")) as pool,
        tqdm(total=len(runs), unit="run", disable=quiet, leave=False) as bar,
    ):
        futures = [pool.submit(_in_process, run, keep) for run in runs]
        left: set[Future[Any]] = set(futures)
        try:
            while left:
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                bar.update(len(done))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        for run, future in zip(runs, futures, strict=True):
            yield run, *future.result()


def _in_process(run: Run, keep: bool) -> tuple[dict[str, Any], SimulationResult | None]:
    result = run.result()
    return run.summary(result), result if keep else None


def _keeps(args: argparse.Namespace) -> bool:
    return bool(args.plots or args.requests_table or args.batches_table)


def _label(run: Run, runs: list[Run]) -> str:
    several = len({other.workload.rate for other in runs}) > 1
    return f"{run.policy} at {run.workload.rate:g}/s" if several else run.policy


def _write(
    args: argparse.Namespace,
    summaries: list[dict[str, Any]],
    results: list[tuple[str, SimulationResult]],
) -> None:
    """The tables and figures asked for. Several runs' tables get numbers."""
    for path, table in (
        (args.requests_table, SimulationResult.request_table),
        (args.batches_table, SimulationResult.batch_table),
    ):
        if not path:
            continue
        for number, (_, result) in enumerate(results):
            name = Path(path)
            if len(results) > 1:
                name = name.with_stem(f"{name.stem}-{number}")
            write_table(table(result), name)
    if args.plots:
        from jaxserve.figures import plots  # matplotlib takes a second

        for figure in plots.draw_all(Path(args.plots), summaries, results, args.views):
            print(f"wrote {figure}", file=sys.stderr)


_COLUMNS = {
    "policy": ("policy", "{}"),
    "rate": ("rate", "{:g}"),
    "latency_s": ("latency, s", "{:.3f}"),
    "makespan_s": ("makespan, s", "{:.3f}"),
    "tps": ("tokens/s", "{:.1f}"),
    "mean_ttft_s": ("TTFT, s", "{:.4f}"),
    "mean_tpot_s": ("TPOT, s", "{:.5f}"),
    "num_batches": ("batches", "{}"),
    "num_preemptions": ("preemptions", "{}"),
    "num_refused": ("refused", "{}"),
    "slo_attainment": ("SLO", "{:.1%}"),
}


def _report(summaries: list[dict[str, Any]]) -> str:
    """A table with a line a run, and one with a line a tier or class where there is more than
    one."""
    names = [n for n in _COLUMNS if any(s[n] is not None for s in summaries)]
    lines = [[_COLUMNS[name][0] for name in names]]
    for summary in summaries:
        lines.append(
            ["-" if summary[n] is None else _COLUMNS[n][1].format(summary[n]) for n in names]
        )
    tables = [aligned(lines)]
    for summary in summaries:
        groups = group_lines(summary)
        if groups:
            rate = "" if summary["rate"] is None else f" at {summary['rate']:g}/s"
            tables += ["", f"{summary['policy']}{rate}", *groups]
    return "\n".join(tables)


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


if __name__ == "__main__":
    sys.exit(main())
