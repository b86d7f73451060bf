"""What hostile and clumsy clients can do to a server, tried on one: in three minutes at most.

    python -m jaxserve.bench abuse
    python -m jaxserve.bench abuse --config=configs/tiny_cpu.py --json

A server process of its own listens on this machine only. It gets prompts that are far too long,
8,000 calls at once, streams that nobody reads, bytes that are no message and numbers at the edge
of what a float holds; then its engine hangs, and that of another one fails. A third has two API
keys, of which one takes all that it can get. Each row says how calls ended, how long the slowest
refusal took, how long others waited meanwhile (a call that asks what is served, again and again),
how much memory the server took more, and how many lines it logged. The
exit code is 1 if something did not hold. Flags of serve.py work too: --config=, --model=, ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.bench import attacks, tenants
from jaxserve.bench.attacks import Tried
from jaxserve.bench.config_flags import read_config
from jaxserve.bench.victim import Victim, victim
from jaxserve.client import Client, ServerError
from jaxserve.client.connection import open_channel
from jaxserve.command_line import Parser
from jaxserve.group_table import aligned
from jaxserve.machine import machine, versions

STALL_S = 3.0  # so that nobody waits long for what is to happen
MAX_WAIT_S = 0.05  # of others, while prompts are too long
MAX_UNREAD_MIB = 2 * attacks.UNREAD  # a buffer of 1 MiB each, and as much on its way
MAX_FILES_MIB = 2 * tenants.FILE_MIB  # of thirty times as much
GRACE_S = 5.0
MAX_EXIT_S = GRACE_S + 6.0
MAX_LINES = 20
_PATIENCE_S = 60.0
_PROBE_S = 0.01
_HEADER = ("", "calls ended", "refused in", "others waited", "memory", "lines", "held")


@dataclass
class Row:
    """What became of one attack. refused_s, others_s: the longest. memory_mib: more than before, at
    most. lines: logged. problems: what did not hold."""

    attack: str
    codes: dict[str, int]
    refused_s: float = 0.0
    others_s: float = 0.0
    memory_mib: float = 0.0
    lines: int = 0
    problems: list[str] = field(default_factory=list)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, checked, with those for the server as `flags`; argparse exits by itself for
    --help. Raises UsageError or ConfigError."""
    parser = Parser(prog="python -m jaxserve.bench abuse", description=__doc__)
    parser.set_defaults(command="abuse")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args, rest = parser.parse_known_args(argv)
    read_config(rest, parser.flags())
    args.flags = rest
    return args


def show(args: argparse.Namespace) -> int:
    """Tries it all and prints; the exit code."""
    where, rows = machine(), run(args.flags)
    print(text(rows), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        sys.stderr.flush()
        result = {"command": "abuse", "rows": [asdict(row) for row in rows]}
        print(json.dumps({**result, "machine": where, "versions": versions()}), flush=True)
    return 1 if any(row.problems for row in rows) else 0


def run(flags: Sequence[str]) -> list[Row]:
    """flags: for the servers."""
    rows = []
    flags = [*flags, f"--config.engine.stall_s={STALL_S}", f"--config.server.grace_s={GRACE_S}"]
    with victim(*flags, "--config.server.exit_on_failure=off") as server:
        longest = measured(server, "prompts far too long", attacks.long_prompts)
        if longest.others_s > MAX_WAIT_S:
            longest.problems.append(f"others waited for more than {1000 * MAX_WAIT_S:.0f} ms")
        rows.append(longest)
        crowd = f"{attacks.OVERLOAD:,} calls at once"
        rows.append(measured(server, crowd, attacks.overload))
        rows.append(measured(server, "no messages", attacks.malformed))
        rows.append(measured(server, "numbers at the edge", attacks.extremes))
        rows.append(measured(server, "an engine that hangs", lambda _: hang(server)))
        unread = f"{attacks.UNREAD} streams unread"
        rows.append(measured(server, unread, lambda _: leave_unread(server)))
        rows.append(stop_unread(server))
    with victim(*flags, "--config.server.exit_on_failure=on") as server:
        rows.append(measured(server, "an engine that fails", lambda _: fail(server)))
    with victim(*flags, batches=True, keys=tenants.key_lines(), key=tenants.QUIET) as server:
        rows += keys_apart(server)
    for row in rows:
        if row.lines > MAX_LINES:
            row.problems.append(f"more than {MAX_LINES} lines were logged")
    return rows


def keys_apart(server: Victim) -> list[Row]:
    """What one key does to another."""
    address = server.http_address
    often = measured(server, "256 requests a call", lambda _: tenants.too_much_at_once(address))
    unread = measured(server, "files unread", lambda _: tenants.unread_files(address))
    if unread.memory_mib > MAX_FILES_MIB:
        unread.problems.append(f"they took more than {MAX_FILES_MIB} MiB")
    return [often, unread]


def text(rows: Sequence[Row]) -> str:
    """The table, and below it what did not hold."""
    lines = [_HEADER]
    for row in rows:
        codes = ", ".join(f"{count:,} {code}" for code, count in sorted(row.codes.items()))
        lines.append(
            (
                row.attack,
                codes or "-",
                f"{row.refused_s:.2f} s",
                f"{1000 * row.others_s:.0f} ms",
                f"{row.memory_mib:+.0f} MiB",
                str(row.lines),
                "no" if row.problems else "yes",
            )
        )
    problems = [f"{row.attack}: {problem}" for row in rows for problem in row.problems]
    return "\n".join([aligned(lines), *problems])


def measured(server: Victim, name: str, attack: Callable[[str], Any]) -> Row:
    """Tries an attack, a coroutine over the server's address, while another client calls."""
    memory, lines = server.memory_mib(), server.lines()
    with watched(server) as most:
        tried: Tried = asyncio.run(attack(server.address))
    row = Row(name, dict(tried.codes), tried.longest_s, problems=tried.problems)
    row.others_s, row.memory_mib = most["wait_s"], max(0.0, most["memory_mib"] - memory)
    row.lines = server.lines() - lines
    return row


@contextlib.contextmanager
def watched(server: Victim) -> Iterator[dict[str, float]]:
    """The longest that another client waits for an answer, and the most memory, meanwhile."""
    most, over = {"wait_s": 0.0, "memory_mib": 0.0}, threading.Event()

    def probe() -> None:
        with Client(server.address, api_key=server.key) as client:
            while not over.wait(_PROBE_S):
                began = time.monotonic()
                with contextlib.suppress(ServerError, OSError):
                    client.info(timeout=_PATIENCE_S)
                    most["wait_s"] = max(most["wait_s"], time.monotonic() - began)
                    most["memory_mib"] = max(most["memory_mib"], server.memory_mib())

    with Client(server.address, api_key=server.key) as client:
        client.info(timeout=_PATIENCE_S)
    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


async def leave_unread(server: Victim) -> Tried:
    """Until the server has given up on them, and serves others; then they vanish."""
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
    """SIGTERM while streams are not read."""
    lines, unread = server.lines(), attacks.Unread(server.address)
    time.sleep(2.0)  # so that they have something to say
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.process.wait(_PATIENCE_S)
    took = time.monotonic() - began
    unread.vanish()
    row = Row("SIGTERM, unread", {f"exit {server.process.returncode}": 1}, took)
    row.lines = server.lines() - lines
    if server.process.returncode != 0 or took > MAX_EXIT_S:
        row.problems.append(f"it did not exit with 0 within {MAX_EXIT_S:g} s")
    return row


async def hang(server: Victim) -> Tried:
    """The engine hangs with a request in flight, and goes on."""
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
    """The engine fails with a request in flight; the process is to end."""
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
    """What health checks of an orchestrator find."""
    with open_channel(server.address, None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=_PATIENCE_S)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
