"""A server under everything at once for a while, and what is left of it afterwards.

    python -m jaxserve.bench soak --minutes=30
    python -m jaxserve.bench soak --minutes=2 --policy=accelgen --seed=1 --json

A server process of its own listens on this machine only, with a pool so small that requests are
preempted. Clients call it through both doors at once: both tiers, any lengths, targets and classes,
streams that are read, read slowly, not read, cancelled, cut off or past their deadline, calls that
are none, and batches. At the end the pool must be empty, no thread or open file left that was not
there before, nothing compiled, and each call must have ended once, the same way to the server as to
its client. Memory: the median of the last third against that of the middle third; the first is for
warming up. The exit code is 1 if something did not hold. Flags of serve.py work too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

from jaxserve.bench.config_flags import read_config
from jaxserve.bench.ledger import Ledger
from jaxserve.bench.soak_caller import Caller
from jaxserve.bench.soak_calls import KINDS
from jaxserve.bench.soak_doors import GrpcDoor, HttpDoor
from jaxserve.bench.victim import Victim, victim
from jaxserve.command_line import Parser
from jaxserve.group_table import aligned
from jaxserve.machine import machine, versions
from jaxserve.server.launch import UsageError

CLIENTS = 24  # threads; more than rows and queue take, now and then
MAX_GROWTH_MIB = 16.0
MAX_NEW_THREADS = 8  # that pools of threads had not started yet when it began
_FLAGS = (
    "--policy=bros",
    "--config.engine.max_model_len=512",
    "--config.cache.num_blocks=128",
    "--config.cache.host_gib=0.002",
    "--config.scheduler.max_rows=8",
    "--config.scheduler.max_batch_tokens=512",
    "--config.scheduler.max_queue=24",
    "--config.server.max_calls=24",
)
_AT_REST = ("num_requests_running", "num_requests_waiting", "num_host_slots_used")
_SETTLE_S = 60.0
_SAMPLE_S = 0.5
_EXIT_S = 60.0


@dataclass
class Outcome:
    """What came of it. by_kind: (kind, how it ended) -> calls. endings: the server's, by (method,
    ending). memory_mib: samples. threads: before and after. problems: what did not hold."""

    seconds: float
    by_kind: Counter[tuple[str, str]]
    endings: dict[tuple[str, str], int]
    memory_mib: list[float]
    preemptions: int = 0
    threads: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)

    def thirds(self) -> list[float]:
        """Median MiB of each third."""
        each = math.ceil(len(self.memory_mib) / 3)
        parts = [self.memory_mib[i * each : (i + 1) * each] for i in range(3)]
        return [statistics.median(part or self.memory_mib) for part in parts]


@dataclass
class Page:
    """values: of metrics without labels, by name without jaxserve:. endings: calls by (method,
    ending)."""

    values: dict[str, float] = field(default_factory=dict)
    endings: dict[tuple[str, str], int] = field(default_factory=dict)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked, with those for the server as `flags`; argparse exits by itself for
    --help. Raises UsageError or ConfigError."""
    parser = Parser(prog="python -m jaxserve.bench soak", description=__doc__)
    parser.set_defaults(command="soak")
    parser.add_argument("--minutes", type=float, default=2.0, help="of calls (2)")
    parser.add_argument("--seed", type=int, default=0, help="of what is asked (0)")
    parser.add_argument(
        "--max_growth_mib",
        type=float,
        default=MAX_GROWTH_MIB,
        help=f"of memory, from the middle third to the last ({MAX_GROWTH_MIB:g})",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args, rest = parser.parse_known_args(argv)
    for name in ("minutes", "max_growth_mib"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name} must be a positive number, got {value:g}")
    args.flags = [*_FLAGS, *rest]
    read_config(args.flags)
    return args


def show(args: argparse.Namespace) -> int:
    """Runs it and prints; the exit code."""
    where = machine()
    outcome = run(args.flags, 60 * args.minutes, args.seed, args.max_growth_mib)
    print(text(outcome), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        sys.stderr.flush()
        result = {"command": "soak", "minutes": args.minutes, "seed": args.seed}
        print(json.dumps({**result, **as_json(outcome), "machine": where, "versions": versions()}))
    return 1 if outcome.problems else 0


def run(
    flags: Sequence[str],
    seconds: float,
    seed: int,
    max_growth_mib: float = MAX_GROWTH_MIB,
    clients: int = CLIENTS,
) -> Outcome:
    """flags: for the server. Raises BenchError if it does not start."""
    with victim(*flags, batches=True) as server:
        ledger, memory = Ledger(), list[float]()
        callers = _callers(server, ledger, seed, clients)
        _each_kind(callers)  # so that what is made once is there
        settled(server, lambda: True)
        threads, handles = server.threads(), Counter(server.handles())
        began, over = time.monotonic(), threading.Event()
        sampler = threading.Thread(target=_sample, args=(server, seconds, memory, over))
        sampler.start()
        try:
            _at_once(callers, lambda caller: _call_until(caller, began + seconds))
        finally:
            over.set()
            sampler.join()
        took = time.monotonic() - began
        for caller in callers:
            caller.grpc.close()
        page = settled(server, lambda: not _new_handles(server, handles))
        outcome = Outcome(took, ledger.by_kind, page.endings, memory)
        outcome.preemptions = int(page.values["num_preemptions_total"])
        outcome.threads = (threads, server.threads())
        outcome.problems = [f"{what} ({count} times)" for what, count in ledger.problems.items()]
        outcome.problems += ledger.disagreements(outcome.endings)
        outcome.problems += _left_over(server, page, handles, outcome)
        growth = outcome.thirds()[2] - outcome.thirds()[1]
        if growth > max_growth_mib:
            limit = f"more than {max_growth_mib:g}"
            outcome.problems.append(f"memory grew by {growth:.1f} MiB, {limit}")
        outcome.problems += _stopped(server)
    return outcome


def text(outcome: Outcome) -> str:
    """The table, and below it what did not hold."""
    lines = [("", "calls", "as their clients saw them end")]
    for kind in sorted({kind for kind, _ in outcome.by_kind}):
        ends = {end: n for (name, end), n in sorted(outcome.by_kind.items()) if name == kind}
        told = ", ".join(f"{count:,} {end}" for end, count in ends.items())
        lines.append((kind, f"{sum(ends.values()):,}", told))
    total: Counter[str] = Counter()
    for (_, ending), count in outcome.endings.items():
        total[ending] += count
    told = ", ".join(f"{count:,} {ending}" for ending, count in sorted(total.items()) if count)
    lines.append(("to the server", f"{total.total():,}", told))
    thirds = ", ".join(f"{each:,.1f}" for each in outcome.thirds())
    before, after = outcome.threads
    return "\n".join(
        [
            aligned(lines),
            f"{outcome.seconds:,.0f} s; {outcome.preemptions:,} preemptions; {thirds} MiB "
            f"(median of each third); {before} threads before, {after} after",
            *(outcome.problems or ["everything held"]),
        ]
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same for programs."""
    return {
        "seconds": outcome.seconds,
        "clients": [[*key, count] for key, count in sorted(outcome.by_kind.items())],
        "server": [[*key, count] for key, count in sorted(outcome.endings.items()) if count],
        "memory_mib": outcome.thirds(),
        "preemptions": outcome.preemptions,
        "threads": list(outcome.threads),
        "problems": outcome.problems,
    }


def metrics(server: Victim) -> Page:
    """As they are now."""
    with urllib.request.urlopen(f"http://{server.http_address}/metrics", timeout=60) as page:
        return read_page(page.read().decode())


def read_page(text: str) -> Page:
    """What Prometheus would read."""
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name.removeprefix("jaxserve:"), sample.labels
            if name == "calls_total":
                page.endings[labels["method"], labels["ending"]] = int(sample.value)
            elif set(labels) <= {"model_name"}:
                page.values[name] = sample.value
    return page


def settled(server: Victim, also: Callable[[], bool]) -> Page:
    """The metrics once nothing runs or waits, and nobody's news are on their way; as they are if
    that does not come to be."""
    until = time.monotonic() + _SETTLE_S
    while True:
        page = metrics(server)
        idle = not any(page.values[name] for name in _AT_REST)
        if (idle and also()) or time.monotonic() > until:
            return page
        time.sleep(_SAMPLE_S)


def _callers(server: Victim, ledger: Ledger, seed: int, clients: int) -> list[Caller]:
    """One a thread; the texts that they know are asked for first."""
    first = Caller(
        random.Random(seed), GrpcDoor(server.address), HttpDoor(server.http_address), ledger
    )
    first.learn()
    callers = []
    for number in range(clients):
        doors = GrpcDoor(server.address), HttpDoor(server.http_address)
        rng = random.Random(f"{seed}, {number}")
        callers.append(Caller(rng, *doors, ledger, first.vocab_size, first.known))
    first.grpc.close()
    return callers


def _each_kind(callers: Sequence[Caller]) -> None:
    """All kinds of calls, all clients at once."""
    kinds = list(KINDS)
    rounds = range(max(len(kinds), len(callers)))

    def call(caller: Caller) -> None:
        for number in rounds[callers.index(caller) :: len(callers)]:
            kinds[number % len(kinds)](caller)

    _at_once(callers, call)


def _call_until(caller: Caller, end: float) -> None:
    kinds, weights = list(KINDS), list(KINDS.values())
    while time.monotonic() < end:
        caller.rng.choices(kinds, weights)[0](caller)


def _at_once(callers: Sequence[Caller], work: Callable[[Caller], None]) -> None:
    """Each on a thread of its own; what one of them did not expect is a problem."""

    def guarded(caller: Caller) -> None:
        try:
            work(caller)
        except Exception as error:
            caller.ledger.problem(f"a client failed: {error!r}")

    threads = [threading.Thread(target=guarded, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _sample(server: Victim, seconds: float, memory: list[float], over: threading.Event) -> None:
    bar = tqdm(total=round(seconds), desc="soak", unit="s", disable=not sys.stderr.isatty())
    with bar:
        while not over.wait(_SAMPLE_S):
            if server.process.poll() is not None:
                return  # whoever calls it finds out
            memory.append(server.memory_mib())
            bar.update(min(_SAMPLE_S, bar.total - bar.n))


def _new_handles(server: Victim, before: Counter[str]) -> Counter[str]:
    return Counter(server.handles()) - before


def _left_over(server: Victim, page: Page, handles: Counter[str], outcome: Outcome) -> list[str]:
    """What is still there, or has happened, that is not to be."""
    found, values = [], page.values
    for name in (*_AT_REST, "compiles_after_warmup_total"):
        if values[name]:
            found.append(f"{name} is {values[name]:.0f} at the end")
    if values["num_blocks_free"] != values["num_blocks"]:
        found.append(f"{values['num_blocks'] - values['num_blocks_free']:.0f} blocks are used")
    if not outcome.preemptions:
        found.append("no request was preempted: the pool is too large to say much")
    before, after = outcome.threads
    if after > before + MAX_NEW_THREADS:
        found.append(f"{after} threads, {before} before")
    found += [f"{n} more open: {name}" for name, n in _new_handles(server, handles).items()]
    return found


def _stopped(server: Victim) -> list[str]:
    """It ends when it is told to."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return [f"it did not end within {_EXIT_S:g} s of SIGTERM"]
    return [] if code == 0 else [f"it ended with {code}"]
