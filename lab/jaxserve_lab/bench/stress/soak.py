"""A server under everything at once for a while, and its state afterwards.

    jaxserve bench soak --minutes=30
    jaxserve bench soak --minutes=2 --policy=accelgen --seed=1 --json

Its server process listens on this machine only, with a pool so small that requests are preempted.
Clients call it over gRPC and HTTP: both tiers, any lengths, targets and classes, streams that are
read, read slowly, not read, cancelled, cut off or past their deadline, malformed calls, and
batches. How long calls wait meanwhile is up to the policy; but once no more are made, all must end.
Then the pool must be empty, there must be no new thread or open file, nothing may have been
compiled, and each call must have ended once, in the same way for the server and its client. Memory:
the median of the last third is compared with that of the middle third; the first is for warming up.
The last line says whether everything held, and the exit code is 1 if something did not. Flags of
serve.py work too.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from jaxserve.bench.command import BenchParser
from jaxserve.command_line import print_result
from jaxserve.machine import machine, versions
from jaxserve.sched.registry import make_policy
from jaxserve.server.startup.launch import UsageError
from jaxserve.simulator.group_table import aligned
from jaxserve_lab.bench.stress.ledger import Ledger
from jaxserve_lab.bench.stress.server_process import Victim, victim
from jaxserve_lab.bench.stress.soak_clients import Clients, ServerLost
from jaxserve_lab.bench.stress.soak_metrics import AT_REST, SAMPLE_S, Page, settled

CLIENTS = 24  # threads; at times more than rows and queue hold
MAX_GROWTH_MIB = 16.0
MAX_NEW_THREADS = 8  # of thread pools that start threads late
_FLAGS = (
    "--policy=bros",
    "--config.engine.max_model_len=512",
    "--config.cache.num_blocks=128",
    "--config.scheduler.max_rows=8",
    "--config.scheduler.max_batch_tokens=512",
    "--config.scheduler.max_queue=24",
    "--config.server.max_calls=24",
)
_HOST = "--config.cache.host_gib=0.002"  # for checkpoints, or cached prefixes
_EXIT_S = 120.0


@dataclass
class Outcome:
    """The outcome of a soak.

    Attributes:
        seconds: Time until the last call ended.
        by_kind: Number of calls, by (kind, how it ended for the client).
        longest_s: The longest wait for the next piece of an answer, by waiter.
        last_s: Time from the last new call to the end of the last call.
        endings: Number of calls, by the server's (method, ending).
        memory_mib: Samples of the server's memory.
        preemptions: Counted by the server.
        threads: Number of the server's threads, before and after.
        problems: Requirements that did not hold.
    """

    seconds: float = 0.0
    by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    longest_s: dict[str, float] = field(default_factory=dict)
    last_s: float = 0.0
    endings: dict[tuple[str, str], int] = field(default_factory=dict)
    memory_mib: list[float] = field(default_factory=list)
    preemptions: int = 0
    threads: tuple[int, int] = (0, 0)
    problems: list[str] = field(default_factory=list)

    def thirds(self) -> list[float]:
        """Median MiB of each third of the samples; empty without samples."""
        if not self.memory_mib:
            return []
        size = math.ceil(len(self.memory_mib) / 3)
        parts = [self.memory_mib[i * size : (i + 1) * size] for i in range(3)]
        return [statistics.median(part or self.memory_mib) for part in parts]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the server's arguments as `flags`; argparse exits
    for --help. Raises UsageError or ConfigError."""
    parser = BenchParser("soak", description=__doc__)
    parser.number("minutes", 2.0, "of calls", least=None)
    parser.number("seed", 0, "of the calls", least=0)
    growth = "of memory, from the middle third to the last"
    parser.number("max_growth_mib", MAX_GROWTH_MIB, growth, least=None)
    args, rest = parser.parse_serving([*_FLAGS, *argv])
    args.flags = rest
    scheduler = args.config.scheduler
    try:
        policy = make_policy(scheduler.policy, **scheduler.params)
    except ValueError as error:
        raise UsageError(f"--policy: {error}") from error
    if policy.moves_cache or args.config.cache.prefix_caching:
        args.flags.insert(0, _HOST)
    return args


def show(args: argparse.Namespace) -> int:
    """Runs the soak and prints; returns the exit code."""
    where = machine()
    outcome = run(args.flags, 60 * args.minutes, args.seed, args.max_growth_mib)
    result = {"command": "soak", "minutes": args.minutes, "seed": args.seed, **as_json(outcome)}
    print_result(args, text(outcome), {**result, "machine": where, "versions": versions()})
    return 1 if outcome.problems else 0


def run(
    flags: Sequence[str],
    seconds: float,
    seed: int,
    max_growth_mib: float = MAX_GROWTH_MIB,
    clients: int = CLIENTS,
) -> Outcome:
    """Starts a server and runs the soak on it.

    Args:
        flags: The server's flags.
        seconds: Time during which calls are made.
        seed: Seed of the calls.
        max_growth_mib: Limit on the growth of memory from the middle third to the last.
        clients: Number of calling threads.

    Raises:
        BenchError: The server does not start.
    """
    with victim(*flags, batches=True) as server:
        outcome = Outcome()
        try:
            _soaked(server, outcome, seconds, seed, clients)
        except ServerLost as lost:
            outcome.problems.insert(0, str(lost))
            return outcome
        except OSError as error:
            outcome.problems.insert(0, f"the server does not answer: {error}")
            return outcome
        outcome.problems += [*grown(outcome, max_growth_mib), *stopped(server)]
    return outcome


def _soaked(server: Victim, outcome: Outcome, seconds: float, seed: int, count: int) -> None:
    """Fills in the outcome. Raises ServerLost."""
    ledger = Ledger()
    outcome.by_kind, outcome.longest_s = ledger.by_kind, ledger.longest_s
    try:
        clients = Clients(server, ledger, seed, count)
        clients.each_kind()  # so that one-time objects exist
        settled(server, lambda: True)
        threads, handles = server.threads(), Counter(server.handles())
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(server, seconds, outcome.memory_mib, over))
        sampler.start()
        began = time.monotonic()
        try:
            outcome.last_s = clients.call_for(seconds)
        finally:
            over.set()
            sampler.join()
            outcome.seconds = time.monotonic() - began
        clients.close()
        page = settled(server, lambda: not _new_handles(server, handles))
        outcome.endings = page.endings
        outcome.preemptions = int(page.values["num_preemptions_total"])
        outcome.threads = (threads, server.threads())
    finally:
        outcome.problems += [f"{what} ({n} times)" for what, n in ledger.problems.items()]
    outcome.problems += ledger.disagreements(outcome.endings)
    outcome.problems += left_over(page, _new_handles(server, handles), outcome)


def text(outcome: Outcome) -> str:
    """The table, and the problems below it."""
    lines = [("", "calls", "as their clients saw them end")]
    for kind in sorted({kind for kind, _ in outcome.by_kind}):
        ends = {end: n for (name, end), n in sorted(outcome.by_kind.items()) if name == kind}
        ends_text = ", ".join(f"{count:,} {end}" for end, count in ends.items())
        lines.append((kind, f"{sum(ends.values()):,}", ends_text))
    total: Counter[str] = Counter()
    for (_, ending), count in outcome.endings.items():
        total[ending] += count
    ends_text = ", ".join(f"{count:,} {ending}" for ending, count in sorted(total.items()) if count)
    lines.append(("to the server", f"{total.total():,}", ends_text))
    thirds = ", ".join(f"{value:,.1f}" for value in outcome.thirds())
    waits = ", ".join(
        f"{waiter} {value:,.1f} s" for waiter, value in sorted(outcome.longest_s.items())
    )
    before, after = outcome.threads
    count = len(outcome.problems)
    return "\n".join(
        [
            aligned(lines),
            f"{outcome.seconds:,.0f} s; {outcome.preemptions:,} preemptions; {thirds} MiB "
            f"(median of each third); {before} threads before, {after} after",
            f"longest waits: {waits}; the last call ended {outcome.last_s:,.1f} s after the end",
            *(f"- {problem}" for problem in outcome.problems),
            f"soak: {count} did not hold" if count else "soak: everything held",
        ]
    )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as a JSON object."""
    return {
        "seconds": outcome.seconds,
        "clients": [[*key, count] for key, count in sorted(outcome.by_kind.items())],
        "server": [[*key, count] for key, count in sorted(outcome.endings.items()) if count],
        "longest_wait_s": outcome.longest_s,
        "last_call_s": outcome.last_s,
        "memory_mib": outcome.thirds(),
        "preemptions": outcome.preemptions,
        "threads": list(outcome.threads),
        "problems": outcome.problems,
    }


def _sample(server: Victim, seconds: float, memory: list[float], over: threading.Event) -> None:
    bar = tqdm(total=round(seconds), desc="soak", unit="s", disable=not sys.stderr.isatty())
    with bar:
        while server.process.poll() is None:  # if it has ended, its clients notice
            with contextlib.suppress(OSError):
                memory.append(server.memory_mib())
            if over.wait(SAMPLE_S):
                return
            bar.update(min(SAMPLE_S, bar.total - bar.n))


def _new_handles(server: Victim, before: Counter[str]) -> Counter[str]:
    return Counter(server.handles()) - before


def left_over(page: Page, handles: Counter[str], outcome: Outcome) -> list[str]:
    """Problems at rest: things that should be empty, or should not have happened. handles: newly
    open files."""
    problems, values = [], page.values
    for name in (*AT_REST, "compiles_after_warmup_total"):
        if values[name]:
            problems.append(f"{name} is {values[name]:.0f} at the end")
    if values["num_blocks_free"] != values["num_blocks"]:
        problems.append(f"{values['num_blocks'] - values['num_blocks_free']:.0f} blocks are used")
    if not outcome.preemptions:
        problems.append("no request was preempted: the pool is too large to say much")
    before, after = outcome.threads
    if after > before + MAX_NEW_THREADS:
        problems.append(f"{after} threads, {before} before")
    problems += [f"{n} more open: {name}" for name, n in handles.items()]
    return problems


def grown(outcome: Outcome, most_mib: float) -> list[str]:
    """A problem if memory grew by more than most_mib from the middle third to the last; else
    none."""
    _, middle, last = outcome.thirds()
    grew = f"memory grew by {last - middle:.1f} MiB, more than {most_mib:g}"
    return [grew] if last - middle > most_mib else []


def stopped(server: Victim) -> list[str]:
    """Sends SIGTERM; returns problems if the server does not end with 0."""
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return [f"it did not end within {_EXIT_S:g} s of SIGTERM"]
    return [] if code == 0 else [f"it ended with {code}"]
