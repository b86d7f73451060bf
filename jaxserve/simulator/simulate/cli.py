r"""Simulates serving: no device, no weights, minutes in seconds.

    jaxserve simulate --policy=vllm --system=llama-2-7b@a100 \
        --workload=fixed:1024x128x32 --kv_tokens=100000 --max_batch_tokens=4096 --json
    jaxserve simulate --policy=vllm,sarathi,edf --workload=sharegpt --rate=2,4,6,8 \
        --slo_ttft_ms=1000 --slo_tbt_ms=100 --plots=figures
    jaxserve simulate --policy=edf,sarathi:watermark=0.05 --workload=sharegpt --rate=8 \
        --classes=chat:0.7:ttft=500ms:tbt=50ms,batch:0.3:tier=best_effort:jct=60s
    jaxserve simulate --policy=sarathi --workload=AzureLLMInferenceTrace_conv.csv
    jaxserve simulate --policy=vllm,sarathi --workload=sharegpt --find=capacity \
        --attainment=0.9 --slo_ttft_ms=1000 --slo_tbt_ms=100 --summary=runs.csv
    jaxserve simulate --policy=vllm,priority --workload=sharegpt --rate=4 --duration=600 \
        --best_effort=closed:batch=64,input=uniform:512:1024,output=uniform:32:128
    jaxserve simulate --policy=sarathi,edf --workload=closed-agent --programs=24 --duration=600
    jaxserve simulate --workload=sharegpt --rate=300 --num_requests=20000 --seeds=1 \
        --slo_ttft_ms=1000 --replicas=64 --routing=slo --routers=4 --snapshot_s=0.5 \
        --snapshot_age_s=0.1 --snapshot_loss=0.05 --faults=0:at=20s:slow=3,7:at=30s
    jaxserve simulate --workload=alpaca --rate=20 --seeds=1 --chrome_trace=trace.json
    jaxserve simulate --replay=served.jsonl --policy=sarathi,vllm,edf

--workload: fixed:IxOxB, a mix (lilo+siso), a data set's name, conversation or agent, whose prompts
continue earlier ones, closed-conversation, closed-agent or closed-research, or a trace's path: a
CSV of prompt_tokens,output_tokens, Azure's or BurstGPT's CSV, Mooncake's JSONL; a trace may have
the parameters of each request in columns max_tokens, tier, ttft_ms, tbt_ms, jct_ms, class and
greedy (true, or false for sampled requests), and its place in a program in columns program, after
(numbers of the requests that it waits for, from 1, joined by +), wait_ms, tool and
program_deadline_ms.
Several policies and rates, separated by commas, run in parallel on all cores.

--best_effort: batches of best-effort requests beside the workload, the first at the start, each of
the others when all requests of the one before have ended; they may write as many tokens as the
longest of them. At --duration the run is cut off: unfinished requests count with what they have
written, as missing targets whose time has passed, and as attaining the others. Throughput, ended/s,
is in the table by tier.

Closed sessions are programs: a call comes when those that it waits for have ended, and a person has
thought, or a tool has run. Programs start at --rate, in calls/s, or --programs are in progress at a
time. A program ends with its last call, or is given up with a call that is refused or fails: its
later calls never come. Its slowdown is the time from its first arrival to its last end over that on
an idle system where each call is served alone, both with the time of tools and people.
--programs_table has a row for each.

--replicas: engines behind one stream of requests, which --routing (jaxserve/sched/routing/)
distributes. A router knows a replica's last snapshot, one every --snapshot_s, and the requests that
it has sent there itself; several routers (--routers) share nothing.
--faults=REPLICA[:at=TIME][:slow=TIMES][:notice=TIME], several separated by commas, replicas counted
from 0: from that time on, or from the start, each step of the replica takes TIMES as long, or,
without slow=, the replica is dead, which routers notice after 1 s or the given time. Its requests
go on at others, where their prompts and tokens are computed again; without others they have failed.

--link=2ms:5ms, with --routing=slo: behind its prompt a request may go on at another replica, and so
may one that would miss its targets where it is. Its cache comes along, which takes 2 ms and 5 more
for each 1,000 tokens (jaxserve/sched/routing/moves.py), from host memory (--host_tokens) to host
memory.
--roles=3:5 has the first 3 replicas compute prompts only, and the other 5 what comes behind them.
Where none of a role is up, the others do its work.

--replay=FILE: the traffic that a server with --config.engine.record=FILE has served, on a system
fitted to its steps, with its limits and its pool; --system, and the flags of limits and pool,
override these; --seed is the server's by default. --rate stretches it to other rates. The
deviations of its steps from the fit are drawn by the seed, in runs of consecutive steps, so that
tails are predicted. At its own rate the recorded outcome is the first row. If the fit is off by
more than half of a step on average, a line before the table says so.

--rules=infermax_paper: as in InferMax's published simulator, in everything that changes its
figures: its batch times, no host time, blocks of one token, no watermark, no prefix caching. Other
flags (--block_size, --prefix_caching) override it, and a line says so.

Everything is run with --seeds seeds, from --seed up: the numbers are means, with the half width of
their 95% confidence intervals. If nothing is drawn by a seed (a trace with its own arrivals, and a
policy without random draws) there is one run. The same seed makes the same requests for every
policy, so several policies are also compared seed by seed, as ratios to the first one. --summary
has all of the numbers. The tables, the figures except the attainment, and the trace are of the
first seed; those of several policies and rates are numbered.

--find=capacity searches, from --rate on (1), for the highest rate at which a share --attainment of
the requests with targets, averaged over the seeds, attain their SLO, to 2.2%: by a server's
verdict, where the longest time between two tokens counts, as in all tables. Requests have to arrive
for five times the longest target, or it reports that it cannot tell.

Exit codes: 0, 1 if a run fails or no capacity is found, 2 if nothing can be simulated with the
command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.command_line import print_result, run_reporting
from jaxserve.simulator.simulate import flags, output, replay
from jaxserve.simulator.simulate.report import capacity_report, columns, report
from jaxserve.simulator.simulate.runs import REFUSED
from jaxserve.simulator.simulate.search import search
from jaxserve.simulator.simulate.sweep import Point, paired, sweep
from jaxserve.simulator.simulate.workers import Workers


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code, see the module's docstring, or 130 for ^C."""
    parser = flags.parser(__doc__ or "", columns())
    args = parser.parse_args(argv)
    problem = flags.check(args)
    if problem:
        parser.error(problem)
    work = _replay if args.replay else _find if args.find else _compare
    return run_reporting("jaxserve simulate", lambda: work(args), *REFUSED)


def _compare(args: argparse.Namespace) -> int:
    """Compares every policy at every rate."""
    runs = flags.runs(args)
    output.check(args, len(runs))
    with Workers(args.jobs) as workers:
        points = sweep(runs, args.seeds, workers)
    output.write(args, points)
    text, found = _comparison(args, points)
    print_result(args, _with_rules(args, text), found)
    return 0


def _replay(args: argparse.Namespace) -> int:
    """Compares every policy on the recorded traffic: with the recorded outcome, unless it is at
    another rate."""
    recorded = replay.read(args)
    runs = recorded.runs(args)
    output.check(args, len(runs))
    served = None if args.rate else recorded.served(runs[0])
    with Workers(args.jobs) as workers:
        points = sweep(runs, args.seeds, workers)
    output.write(args, points, served)
    text, found = _comparison(args, points if served is None else [served, *points])
    found["recording"] = recorded.as_json()
    print_result(args, "\n".join([*recorded.doubts(args), text, "", *recorded.notes]), found)
    return 0


def _comparison(args: argparse.Namespace, points: Sequence[Point]) -> tuple[str, dict[str, Any]]:
    """As text and as JSON: every policy at every rate, and the ratios to the first policy."""
    compared = paired(points)
    text = report(points, compared, range(args.seed, args.seed + args.seeds))
    ratios = [one.as_json() for one in compared]
    return text, {"points": [point.as_json() for point in points], "ratios": ratios}


def _find(args: argparse.Namespace) -> int:
    """Finds the capacity of every policy."""
    args.rate = args.rate or [flags.FIRST_RATE]
    level = flags.ATTAINMENT if args.attainment is None else args.attainment
    runs = flags.runs(args)
    output.check(args, len(runs))
    with Workers(args.jobs) as workers:
        searches = search(runs, level, args.seeds, workers)
    tried = [point for one in searches for point in one.points()]
    output.write(args, tried)
    found = [(one.point(), one.capacity()) for one in searches]
    capacities = [
        {"policy": point.run.policy, "rate": capacity.rate, "bound": capacity.bound}
        for point, capacity in found
    ]
    content = {"capacity": capacities, "points": [point.as_json() for point in tried]}
    print_result(args, _with_rules(args, capacity_report(found, level)), content)
    problems = [one.problem() for one in searches if one.problem()]
    for problem in problems:
        print(f"jaxserve simulate: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _with_rules(args: argparse.Namespace, text: str) -> str:
    """The text, with a line about deviations from the rules."""
    return "\n".join(filter(None, (text, flags.beside_rules(args))))
