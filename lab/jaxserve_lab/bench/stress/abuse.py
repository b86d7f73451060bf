"""Attacks by hostile and clumsy clients, tried on a server in five to ten minutes.

    jaxserve bench abuse
    jaxserve bench abuse --config=tiny_cpu --json

Its server processes listen on this machine only. They get the attacks in CASES, over gRPC and HTTP;
then one engine hangs, and another one fails. Each row has how calls ended, the slowest refusal, how
long other clients waited meanwhile (repeated calls for the models and for health over HTTP), the
server's additional memory, at most and afterwards, and its number of logged lines. During floods of
one API key another key makes calls, too: their median may be three times the earlier one, or longer
by a step. The exit code
is 1 if something did not hold.
Flags of serve.py work too: --config=, --model=, ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.bench.command import BenchParser, read_config
from jaxserve.client import Client, ServerError
from jaxserve.client.connection import open_channel
from jaxserve.command_line import print_result
from jaxserve.machine import machine, versions
from jaxserve.server.open_files import raise_limit
from jaxserve.simulator.group_table import aligned
from jaxserve_lab.bench.stress import attacks, floods, http_attacks, tenants
from jaxserve_lab.bench.stress.attacks import Tried
from jaxserve_lab.bench.stress.server_process import Victim, victim

STALL_S = 3.0  # so that failures come soon
MAX_WAIT_S = 0.05  # of other clients, during prompts that are too long
MAX_UNREAD_MIB = 2 * attacks.UNREAD  # a buffer of 1 MiB each, and as much in transit
MAX_FILES_MIB = 2 * tenants.FILE_MIB  # though thirty times as much is requested
GRACE_S = 5.0
MAX_EXIT_S = GRACE_S + 6.0
MAX_LINES = 30  # including a traceback
MAX_HEALTH_S = 0.1  # for any body
MAX_KEPT_MIB = 80  # after bodies of 8 MiB
_PATIENCE_S = 60.0
_PROBE_S = 0.01
_SETTLE_S = 2.0
_HEADER = (
    *("", "calls ended", "refused in", "others waited", "health", "another key", "memory"),
    *("kept", "lines", "held"),
)


@dataclass
class Row:
    """The outcome of one attack.

    Attributes:
        attack: Its name.
        codes: Number of calls, by how they ended.
        refused_s: Seconds of the slowest refusal.
        others_s: Most seconds that another client waited for an answer.
        health_s: Most seconds of a call of /health.
        memory_mib: Most additional memory of the server.
        kept_mib: Its additional memory afterwards.
        lines: Lines that it logged.
        problems: Requirements that did not hold.
        idle_s, beside_s, worst_s: As in `Tried`.
    """

    attack: str
    codes: dict[str, int]
    refused_s: float = 0.0
    others_s: float = 0.0
    health_s: float = 0.0
    memory_mib: float = 0.0
    kept_mib: float = 0.0
    lines: int = 0
    problems: list[str] = field(default_factory=list)
    idle_s: float = 0.0
    beside_s: float = 0.0
    worst_s: float = 0.0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the server's arguments as `flags`; argparse exits
    for --help. Raises UsageError or ConfigError."""
    args, rest = BenchParser("abuse", description=__doc__).parse_serving(argv)
    args.flags = rest
    return args


def show(args: argparse.Namespace) -> int:
    """Runs all attacks and prints; returns the exit code."""
    where, rows = machine(), run(args.flags)
    result = {"command": "abuse", "rows": [asdict(row) for row in rows]}
    print_result(args, text(rows), {**result, "machine": where, "versions": versions()})
    return 1 if any(row.problems for row in rows) else 0


@dataclass(frozen=True)
class AbuseCase:
    """An attack and its limits, in addition to what the attack itself expects.

    Attributes:
        name: As in the table.
        attack: Runs it on a server.
        others_s, health_s: Most seconds that other clients, and /health, may take.
        most_mib: Most additional memory of the server.
        kept_mib: Most additional memory afterwards.
    """

    name: str
    attack: Callable[[Victim], Tried]
    others_s: float = math.inf
    health_s: float = math.inf
    most_mib: float = math.inf
    kept_mib: float = math.inf


def run(flags: Sequence[str]) -> list[Row]:
    """Starts servers with these flags and runs all attacks on them."""
    raise_limit()  # for our own connections
    flags = [*flags, f"--config.engine.stall_s={STALL_S}", f"--config.server.grace_s={GRACE_S}"]
    off, on = (f"--config.server.exit_on_failure={value}" for value in ("off", "on"))
    with victim(*flags, off, open_files=http_attacks.OPEN_FILES) as server:
        rows = [measured(server, case) for case in CASES]
        rows.append(stop_unread(server))
    with victim(*flags, on) as server:
        rows += [measured(server, case) for case in LAST]
    keys, key = tenants.key_lines(), tenants.QUIET
    usual = [*flags, off]
    flags = [*usual, "--policy=edf"]
    finds = read_config(flags).cache.prefix_caching
    with (
        hostile_model(flags) as own,
        victim(*flags, *own, batches=True, keys=keys, key=key) as server,
    ):
        tells = {TEMPLATE: bool(own), TIMED: finds}
        rows += [measured(server, case) for case in KEYED if tells.get(case, True)]
    with (
        wide_model(usual) as own,
        victim(*usual, *own, batches=True, keys=keys, key=key) as server,
    ):
        rows += [measured(server, case) for case in FLOODED]
        rows.append(stop(server, "SIGTERM behind floods"))
    for row in rows:
        if row.lines > MAX_LINES:
            row.problems.append(f"more than {MAX_LINES} lines were logged")
    return rows


def hostile_model(flags: Sequence[str]) -> AbstractContextManager[list[str]]:
    """Flags for the same model with a chat template that loops or takes all memory; none for a
    model without a checkpoint."""
    return _changed_model(flags, "chat_template.jinja", lambda _: http_attacks.HOSTILE_TEMPLATE)


def wide_model(flags: Sequence[str]) -> AbstractContextManager[list[str]]:
    """The same, with a tokenizer for which no text is too long by its bytes."""

    def widened(text: str) -> str:
        spec = json.loads(text or '{"added_tokens": []}')
        for token in spec["added_tokens"]:
            token["lstrip"] |= token["content"] == floods.MARK
        return json.dumps(spec)

    return _changed_model(flags, "tokenizer.json", widened)


@contextlib.contextmanager
def _changed_model(
    flags: Sequence[str], name: str, change: Callable[[str], str]
) -> Iterator[list[str]]:
    """Flags for the same model with a changed file; none for a model without a checkpoint. change:
    makes the file's text from the old one, if any."""
    path = read_config(flags).model.path
    if not path:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        text = ""
        for file in Path(path).expanduser().iterdir():
            if file.name == name:
                text = file.read_text(encoding="utf-8")
            else:
                (Path(folder) / file.name).symlink_to(file.absolute())
        (Path(folder) / name).write_text(change(text), encoding="utf-8")
        yield [f"--model={folder}"]


def text(rows: Sequence[Row]) -> str:
    """The table, and the problems below it."""
    lines = [_HEADER]
    for row in rows:
        codes = ", ".join(f"{count:,} {code}" for code, count in sorted(row.codes.items()))
        lines.append(
            (
                row.attack,
                codes or "-",
                f"{row.refused_s:.2f} s",
                f"{1000 * row.others_s:.0f} ms",
                f"{1000 * row.health_s:.0f} ms",
                _another(row),
                f"{row.memory_mib:+.0f} MiB",
                f"{row.kept_mib:+.0f} MiB",
                str(row.lines),
                "no" if row.problems else "yes",
            )
        )
    problems = [f"{row.attack}: {problem}" for row in rows for problem in row.problems]
    return "\n".join([aligned(lines), *problems])


def _another(row: Row) -> str:
    times = (row.idle_s, row.beside_s, row.worst_s)
    return (
        "{:.0f} -> {:.0f}, at most {:.0f} ms".format(*(1000 * t for t in times))
        if row.idle_s
        else ""
    )


def measured(server: Victim, case: AbuseCase) -> Row:
    """Runs a case while other clients call, and checks its limits."""
    memory, lines = server.memory_mib(), server.lines()
    with watched(server) as most:
        tried = case.attack(server)
    row = Row(case.name, dict(tried.codes), tried.longest_s, problems=tried.problems)
    row.others_s, row.health_s = most["others_s"], most["health_s"]
    row.idle_s, row.beside_s, row.worst_s = tried.idle_s, tried.beside_s, tried.worst_s
    row.memory_mib = max(0.0, most["memory_mib"] - memory)
    row.kept_mib = max(0.0, _kept(server) - memory)
    row.lines = server.lines() - lines
    none = 0 if math.isfinite(case.health_s) else math.inf
    for what, limit, value in (
        ("{:.0f} calls of others had no answer", none, most["unanswered"]),
        ("others waited for {:.0f} ms", 1000 * case.others_s, 1000 * row.others_s),
        ("/health took {:.0f} ms", 1000 * case.health_s, 1000 * row.health_s),
        ("it took {:.0f} MiB more", case.most_mib, row.memory_mib),
        ("{:.0f} MiB were kept", case.kept_mib, row.kept_mib),
    ):
        if value > limit:
            row.problems.append(f"{what.format(value)}, and {limit:.0f} is allowed")
    return row


def _kept(server: Victim) -> float:
    """The server's memory, MiB, after some time to give memory back."""
    samples = []
    for _ in range(10):
        if server.process.poll() is None:
            samples.append(server.memory_mib())
        time.sleep(_SETTLE_S / 10)
    return min(samples, default=0.0)


@contextlib.contextmanager
def watched(server: Victim) -> Iterator[dict[str, float]]:
    """Makes other clients' calls meanwhile. Yields their longest wait, the number of calls without
    an answer, and the server's most memory."""
    most = dict.fromkeys(("others_s", "health_s", "unanswered", "memory_mib"), 0.0)
    over = threading.Event()

    def probe(name: str, ask: Callable[[], object]) -> None:
        while not over.wait(_PROBE_S):
            began, unanswered = time.monotonic(), 0.0
            try:
                ask()
            except (ServerError, OSError, http.client.HTTPException):
                unanswered = 1.0
            if server.process.poll() is None:
                most["unanswered"] += unanswered
                most[name] = max(most[name], time.monotonic() - began)
                with contextlib.suppress(OSError):
                    most["memory_mib"] = max(most["memory_mib"], server.memory_mib())

    with Client(server.address, api_key=server.key) as client:
        client.info(timeout=_PATIENCE_S)
        asks = {
            "others_s": lambda: client.info(timeout=_PATIENCE_S),
            "health_s": lambda: http_attacks.call(server, "/health"),
        }
        threads = [threading.Thread(target=probe, args=item) for item in asks.items()]
        for thread in threads:
            thread.start()
        try:
            yield most
        finally:
            over.set()
            for thread in threads:
                thread.join()


async def leave_unread(server: Victim) -> Tried:
    """Leaves streams unread until the server has given them up and serves other calls; then closes
    them."""
    before, unread = server.memory_mib(), attacks.Unread(server.address)
    deadline = time.monotonic() + _PATIENCE_S
    ended = ""
    while ended != "OK" and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        ended = await attacks.served(server.address)
    taken = server.memory_mib() - before
    tried = await asyncio.to_thread(unread.read)
    unread.vanish()
    tried.expect(ended == "OK", "others were not served meanwhile")
    limit = f"they took more than {MAX_UNREAD_MIB} MiB"
    tried.expect(taken <= MAX_UNREAD_MIB, limit)
    return tried


def stop_unread(server: Victim) -> Row:
    """Sends SIGTERM while streams are not read."""
    unread = attacks.Unread(server.address)
    time.sleep(2.0)  # so that they have output
    row = stop(server, "SIGTERM, unread")
    unread.vanish()
    return row


def stop(server: Victim, name: str) -> Row:
    """Sends SIGTERM, and expects the server to end."""
    lines, began = server.lines(), time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(_PATIENCE_S)
    took = time.monotonic() - began
    row = Row(name, {f"exit {server.process.returncode}": 1}, took)
    row.lines = server.lines() - lines
    if server.process.returncode != 0 or took > MAX_EXIT_S:
        row.problems.append(f"it did not exit with 0 within {MAX_EXIT_S:g} s")
    return row


async def hang(server: Victim) -> Tried:
    """The engine hangs with a request in flight, and continues."""
    tried = Tried()
    with Client(server.address) as client:
        server.process.send_signal(signal.SIGUSR1)
        stream = client.generate("Once upon a time", max_tokens=8, timeout=_PATIENCE_S)
        began = time.monotonic()
        while (ended := await attacks.served(server.address, 1.0)) != "UNAVAILABLE":
            if time.monotonic() - began > STALL_S + 10:
                tried.problems.append("nobody noticed")
                break
        tried.codes[ended] += 1
        tried.expect(not healthy(server), "health said SERVING")
        server.process.send_signal(signal.SIGUSR1)
        tried.expect(bool(list(stream)), "the request did not go on")
        tried.codes["OK"] += 1
    for _ in range(100):
        if healthy(server):
            break
        await asyncio.sleep(0.1)
    tried.expect(healthy(server), "health did not come back")
    return tried


async def fail(server: Victim) -> Tried:
    """The engine fails with a request in flight; the process must end."""
    tried = Tried()
    with Client(server.address) as client:
        stream = client.generate("Once upon a time", max_tokens=400, timeout=_PATIENCE_S)
        next(stream)
        server.process.send_signal(signal.SIGUSR2)
        try:
            list(stream)
            tried.codes["OK"] += 1
        except ServerError as error:
            tried.codes[error.code] += 1
    tried.expect(set(tried.codes) == {"INTERNAL"}, "the call did not end with INTERNAL")
    try:
        code = await asyncio.to_thread(server.process.wait, _PATIENCE_S)
    except subprocess.TimeoutExpired:
        code = None
    tried.codes[f"exit {code}"] += 1
    tried.expect(code == 1, "the process did not exit with 1")
    return tried


def healthy(server: Victim) -> bool:
    """Whether the gRPC health check, which an orchestrator uses, says SERVING."""
    with open_channel(server.address, None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def _run(attack: Callable[[Victim], Coroutine[Any, Any, Tried]]) -> Callable[[Victim], Tried]:
    return lambda server: asyncio.run(attack(server))


def _grpc(attack: Callable[[str], Coroutine[Any, Any, Tried]]) -> Callable[[Victim], Tried]:
    return _run(lambda server: attack(server.address))


def _http(attack: Callable[[str], Coroutine[Any, Any, Tried]]) -> Callable[[Victim], Tried]:
    return _run(lambda server: attack(server.http_address))


CASES = (
    AbuseCase("prompts far too long", _grpc(attacks.long_prompts), others_s=MAX_WAIT_S),
    AbuseCase(f"{attacks.OVERLOAD:,} calls at once", _grpc(attacks.overload)),
    AbuseCase("no messages", _grpc(attacks.malformed)),
    AbuseCase("numbers at the edge", _grpc(attacks.extremes)),
    AbuseCase("strings that are no text", http_attacks.strings),
    AbuseCase("integers of 400 digits", http_attacks.integers),
    AbuseCase(
        "bodies up to 8 MiB", http_attacks.bodies, health_s=MAX_HEALTH_S, kept_mib=MAX_KEPT_MIB
    ),
    AbuseCase(f"{http_attacks.SILENT:,} silent connections", http_attacks.silent),
    AbuseCase("requests with two ends", http_attacks.framing),
    AbuseCase("pages of other sites", http_attacks.browsers),
    AbuseCase("an engine that hangs", _run(hang)),
    AbuseCase(f"{attacks.UNREAD} streams unread", _run(leave_unread)),
)
"""Attacks on a server without API keys."""
LAST = (AbuseCase("an engine that fails", _run(fail)),)
"""The last attack on a server, which ends it."""
TEMPLATE = AbuseCase("a chat template that loops", http_attacks.template)
TIMED = AbuseCase("another's prompts, timed", _http(tenants.timed_prompts))
KEYED = (
    AbuseCase("256 requests per call", _http(tenants.too_much_at_once)),
    AbuseCase(f"{tenants.PROMPTS} requests of another", _http(tenants.many_prompts)),
    AbuseCase("files unread", _http(tenants.unread_files), most_mib=MAX_FILES_MIB),
    AbuseCase(f"{http_attacks.LIARS} liars under edf", http_attacks.liars),
    TIMED,
    TEMPLATE,
)
"""Attacks on a server with two API keys, whose policy sorts by the requests' targets."""
FLOODED = tuple(AbuseCase(name, flood) for name, flood in floods.FLOODS.items())
"""Attacks on another server, which accepts texts of any length."""
