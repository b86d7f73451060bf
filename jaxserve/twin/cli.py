r"""Observes a server with OpenAI's API, and makes a twin of it: a recording to simulate with.

    jaxserve observe --url=http://localhost:8000 --workload=sharegpt --rate=0.5,1,2 --out=seen.jsonl
    jaxserve observe --url=http://localhost:8000 --workload=trace.csv --out=seen.jsonl
    jaxserve observe --url=http://localhost:8000 --listen=9000 --minutes=10 --out=seen.jsonl
    jaxserve simulate --replay=seen.jsonl --policy=sarathi_pc,goodput --slo_ttft_ms=1000
    jaxserve size --replay=seen.jsonl --rate=20 --slo_ttft_ms=1000 --slo_tbt_ms=100

It sends the workload as streamed completions of random tokens, one rate after the other, and notes
when tokens come; or with --listen passes on for some minutes what clients send to that port. Texts
are not kept. From the times it works out the server's steps, to which a cost model is fitted, and
chooses what cannot be seen: tokens of a step, rows, and the size of the cache, unless the server's
metrics or flags say so. The last 30% of the requests are not fitted to: they tell how far off the
twin is.

The key for the server is that in the environment, OPENAI_API_KEY. Exit codes: 0, 1 if the server
does not serve, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.http_target import Address, HttpTarget
from jaxserve.bench.load_target import BenchError, Drive, check_fits, drive, random_jobs
from jaxserve.command_line import Parser, print_result, run_reporting
from jaxserve.sched.recording import RecordingError
from jaxserve.simulator.simulate.flags import rates
from jaxserve.simulator.workload_flags import positive, positive_int
from jaxserve.simulator.workloads.specs import ARRIVALS, WorkloadSpec
from jaxserve.simulator.workloads.workload import Workload, WorkloadError
from jaxserve.twin.proxy import Proxy
from jaxserve.twin.recordings import ServerFacts, Twin, make_twin
from jaxserve.twin.server_facts import facts_of
from jaxserve.twin.steps import SeenRequest

FIRST_ID = 3  # the ids before it are often those of special tokens
VOCABULARY = 1000
PAUSE_S = 1.0  # between two rates
WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code, see the module's docstring, or 130 for ^C."""
    parser = _parser()
    args = parser.parse_args(argv)
    problem = _problem(args)
    if problem:
        parser.error(problem)
    errors = (BenchError, WorkloadError, RecordingError, OSError)
    return run_reporting("jaxserve observe", lambda: _observe(args), *errors)


def _parser() -> Parser:
    parser = Parser(prog="jaxserve observe", description=__doc__)
    add = parser.add_argument
    add("--url", required=True, type=_address, help="the server, such as http://localhost:8000")
    add("--out", required=True, help="where the recording goes")
    add("--model", default="", help="of several (the server's first)")
    add("--workload", help="lengths to send: a data set's name, fixed:IxOxB, or a trace's path")
    add("--num_requests", type=positive_int, help="requests at each rate (100; all of a trace)")
    add("--arrivals", choices=ARRIVALS, help="how they arrive (as in the trace; else poisson)")
    add("--rate", type=rates, help="requests/s, several separated by commas")
    add("--cv", type=positive, help="gamma arrivals: deviation of the gaps over their mean")
    add("--seed", type=positive_int, default=1, help="of lengths, arrivals and prompts (1)")
    kinds = "token ids, or text for servers that take no ids: as many words as tokens (ids)"
    add("--prompts", choices=("ids", "text"), default="ids", help=kinds)
    most = "prompts are drawn from the ids below it"
    add("--vocabulary", type=positive_int, default=VOCABULARY, help=f"{most} ({VOCABULARY})")
    add("--listen", type=_port, metavar="PORT", help="pass on what clients send to this port")
    add("--minutes", type=positive, help="how long to listen (until ^C)")
    for name, what in (
        ("max_batch_tokens", "tokens of a step, if known"),
        ("max_rows", "requests of a step, if known"),
        ("kv_tokens", "tokens of the cache, if its metrics do not say"),
    ):
        add(f"--{name}", type=positive_int, help=what)
    add("--json", action="store_true", help="one JSON object as the last line")
    return parser


def _problem(args: argparse.Namespace) -> str:
    """A line about flags that contradict each other; "" if there are none."""
    sends = ("workload", "num_requests", "arrivals", "rate", "cv")
    given = [name for name in sends if getattr(args, name) is not None]
    if args.listen is None and args.workload is None:
        return "--workload or --listen is needed"
    if args.listen is not None and given:
        return f"--{given[0]} does not go with --listen: clients send what they want"
    if args.listen is None and args.minutes is not None:
        return "--minutes is for --listen"
    if args.vocabulary <= FIRST_ID:
        return f"--vocabulary must be more than {FIRST_ID}, got {args.vocabulary}"
    return ""


def _observe(args: argparse.Namespace) -> int:
    known = {name: getattr(args, name) for name in ("max_batch_tokens", "max_rows", "kv_tokens")}
    facts = facts_of(args.url, args.model, **known)
    with Path(args.out).open("w", encoding="utf-8"):  # that it can be written shows at once
        pass
    seen, notes = _listen(args) if args.listen is not None else _send(args, facts)
    twin = make_twin(seen, facts)
    twin.write(args.out)
    print_result(args, _text(twin, facts, len(seen), notes), _as_json(twin, facts, len(seen)))
    return 0


def _send(args: argparse.Namespace, facts: ServerFacts) -> tuple[list[SeenRequest], list[str]]:
    """Sends the workload at each rate."""
    known = facts.max_model_len or 2**31
    room = facts.kv_tokens or known
    info = {"max_model_len": known, "pool_tokens": room, "model": facts.model}
    target = HttpTarget(args.url, info, model=facts.model, say=_speech(args.prompts))
    workloads = [_workload(args, rate) for rate in args.rate or [None]]
    for one in workloads:
        check_fits(one, info)
    target.probe()
    seen, failed, start = list[SeenRequest](), list[str](), None
    for number, workload in enumerate(workloads):
        if number:
            time.sleep(PAUSE_S)
        rng = np.random.default_rng((args.seed, number))
        jobs = random_jobs(workload, args.vocabulary - FIRST_ID, rng)
        driven = drive(target, jobs, workload)
        start = driven.start if start is None else start
        seen += _seen(driven, workload, start)
        failed += [one.error for one in driven.records if one.outcome != "finished"]
    notes = [f"{len(failed)} requests failed, such as: {failed[0]:.200}"] if failed else []
    return seen, notes


def _workload(args: argparse.Namespace, rate: float | None) -> Workload:
    count = args.num_requests
    if count is None and args.arrivals != "replay" and not Path(args.workload).exists():
        count = None if args.workload.startswith("fixed:") else 100
    spec = WorkloadSpec(args.workload, count, args.arrivals, rate, args.cv, max_tokens="length")
    return spec.make_workload(args.seed)


def _speech(prompts: str) -> Callable[[tuple[int, ...]], Any]:
    """What makes a prompt of a job's ids."""
    if prompts == "ids":
        return lambda ids: [FIRST_ID + one for one in ids]
    return lambda ids: " ".join(WORDS[one % len(WORDS)] for one in ids)


def _seen(driven: Drive, workload: Workload, start: float) -> Iterator[SeenRequest]:
    """What became of the requests, in seconds since the start."""
    for number, record in zip(driven.came, driven.records, strict=True):
        prompt = record.prompt_tokens or int(workload.prompt_len[number])
        times = np.array(record.token_times) - start
        computed = max(prompt - record.cached_tokens, 1)
        yield SeenRequest(record.sent - start, computed, times, int(workload.limit[number]))


def _listen(args: argparse.Namespace) -> tuple[list[SeenRequest], list[str]]:
    """Passes calls on for the minutes, or until ^C."""
    with Proxy(args.url, port=args.listen) as proxy:
        print(f"listening at {proxy.url}; ^C ends it", file=sys.stderr)
        try:
            time.sleep(60 * args.minutes if args.minutes else 1e9)
        except KeyboardInterrupt:
            print("", file=sys.stderr)
        seen = proxy.seen()
        notes = []
        if proxy.unseen:
            notes.append(
                f"{proxy.unseen} answers were not streamed: they kept the server busy unseen"
            )
        if proxy.failed:
            notes.append(f"{proxy.failed} calls had no whole answer")
    return seen, notes


def _text(twin: Twin, facts: ServerFacts, count: int, notes: Sequence[str]) -> str:
    header = twin.header
    lines = [
        f"{header.model}: {count} requests seen; a twin with {header.max_batch_tokens} tokens a "
        f"step, {header.max_rows} rows, {header.num_blocks // 2 * header.block_size:,} tokens of "
        f"cache" + (f" ({facts.source})" if facts.source else "")
    ]
    lines += [f"chosen, since not known: {'; '.join(twin.guessed)}"] if twin.guessed else []
    lines += notes
    if twin.errors:
        lines.append("on the last requests, which it was not fitted to (seen, simulated, ms):")
    for one in twin.errors:
        mean, p99 = ([1e3 * value for value in pair] for pair in (one.mean, one.p99))
        lines.append(
            f"  {one.name:<20} mean {mean[0]:8.1f} {mean[1]:8.1f} {one.mean_off:+6.1%}"
            f"   P99 {p99[0]:8.1f} {p99[1]:8.1f} {one.p99_off:+6.1%}"
        )
    return "\n".join(lines)


def _as_json(twin: Twin, facts: ServerFacts, count: int) -> dict[str, Any]:
    header = twin.header
    return {
        "model": header.model,
        "source": facts.source,
        "requests": count,
        "max_batch_tokens": header.max_batch_tokens,
        "max_rows": header.max_rows,
        "kv_tokens": header.num_blocks // 2 * header.block_size,
        "overlap": header.overlap,
        "chosen": list(twin.guessed),
        "errors": {
            one.name: {
                "mean_s": one.mean,
                "p99_s": one.p99,
                "mean_off": one.mean_off,
                "p99_off": one.p99_off,
            }
            for one in twin.errors
        },
    }


def _port(text: str) -> int:
    return positive_int(text, 65535)


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except BenchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
