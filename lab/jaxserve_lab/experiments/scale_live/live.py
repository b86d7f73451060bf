"""Measures what becomes of calls while a deployment on Ray Serve is scaled, and a replica killed.

    python -m jaxserve_lab.experiments.scale_live
    python -m jaxserve_lab.experiments.scale_live --out=docs/figures/scale-live.json

A Ray cluster on this machine, replicas of the model in the box, OpenAI's client over the proxy: 1
replica becomes 2 under load, one of them is killed under 200 streams, and there is 1 again when
the load has gone; then streams move from one to another, and these are killed at 20 moments. It
takes some ten minutes on two idle cores. --out: where the numbers go,
from which `python -m jaxserve_lab.experiments.scale` writes a section of its page.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxserve.command_line import Parser
from jaxserve.deploy.local.cluster import Cluster, local_cluster
from jaxserve.deploy.settings import Settings
from jaxserve.machine import machine
from jaxserve.writable import check_file
from jaxserve_lab.experiments.scale_live.agree import Agreed, agree
from jaxserve_lab.experiments.scale_live.ahead import Ahead, ahead
from jaxserve_lab.experiments.scale_live.moves import Apart, Faults, apart, faults
from jaxserve_lab.experiments.scale_live.streams import (
    MODEL,
    SEEDS,
    Stream,
    client,
    metrics,
    mixed,
    stream,
    until,
    wait_replaced,
)

STREAMS, TOKENS = 200, 64
LONG, LONG_TOKENS = 100, 192
BEGUN = 20  # streams, at which a replica is killed: later, it may be done with all of its own
MANY, FEW = 48, 2  # clients that go on asking while replicas come and go
ALONE = 20  # calls one after the other
ROLES = ("1:1", "")
KILLS = 20  # at random moments, while streams move
# Few steps to compile: this is about calls, not about speed.
FLAGS = (
    "--config.scheduler.max_batch_tokens=256",
    "--config.engine.row_buckets=(16,)",
    "--config.engine.token_buckets=(256,)",
    "--config.cache.host_gib=0.125",  # for moves
)
_CPUS = 2  # of Ray's count
_SCALE_S = 300.0
_WRITTEN = "generation_tokens_total"
_SHARE = MANY * TOKENS  # tokens of a replica until its calls are a matter of course


@dataclass(frozen=True)
class Scaled:
    """What became of calls while the deployment was scaled.

    Attributes:
        replicas: Before and after.
        seconds: Until the new number served.
        calls: Those that ended meanwhile.
        failed: Calls that ended with an error.
        wrong: Calls with another text.
    """

    replicas: tuple[int, int]
    seconds: float
    calls: int
    failed: int
    wrong: int


@dataclass(frozen=True)
class Killed:
    """What became of streams when one of two replicas was killed, or stopped.

    Attributes:
        streams: How many there were.
        begun: How many had begun by then.
        whole: Those that got all of their text.
        cut: Those that got an error after some text.
        failed: Those that got an error and no text.
        wrong: Those whose text, whole or cut, is not what it should be.
        errors: The different errors.
        recovered: Seconds from the streams' end until two replicas served again.
        moved: Streams that went on at the other replica.
        gap: Longest time that one of them had between two pieces, in seconds.
        usual_gap: The same of those that did not move.
    """

    streams: int
    begun: int
    whole: int
    cut: int
    failed: int
    wrong: int
    errors: tuple[str, ...]
    recovered: float
    moved: int
    gap: float
    usual_gap: float


@dataclass(frozen=True)
class Drained:
    """What became of long streams when one of two replicas was removed under them.

    Attributes:
        streams: How many there were.
        tokens: Of each.
        whole: Those that got all of their text.
        failed: Those that ended with an error.
        wrong: Those whose text is not what it should be.
        moved: Those that went on at the other replica.
        seconds: From the request to remove one until its process had ended.
        longest: Seconds that the longest stream took.
        gap: Longest time that one that moved had between two pieces, in seconds.
        usual_gap: The same of those that did not move.
    """

    streams: int
    tokens: int
    whole: int
    failed: int
    wrong: int
    moved: int
    seconds: float
    longest: float
    gap: float
    usual_gap: float


@dataclass(frozen=True)
class Found:
    """All that was measured.

    Attributes:
        machine: Where.
        ready: Seconds until the first replica served.
        ttft: Median of ALONE calls, seconds.
        up: From one replica to two.
        killed: With one of the two killed.
        down: From two to one.
        drained: With one of two removed under long streams.
        frozen: With one of two stopped, so that it says nothing any more.
        apart: With prompts at one, and what follows at the other.
        faults: With those killed while streams move.
        ahead: With caches sent ahead of streams.
        agreed: The same requests live and simulated, for each of the roles.
    """

    machine: dict[str, Any]
    ready: float
    ttft: float
    up: Scaled
    killed: Killed
    down: Scaled
    drained: Drained
    frozen: Killed
    apart: Apart
    faults: Faults
    ahead: Ahead
    agreed: tuple[Agreed, ...]


def settings(replicas: int = 1, max_replicas: int = 2) -> Settings:
    """One replica of the bundled model, or two by load."""
    return Settings(
        replicas=replicas,
        max_replicas=max_replicas,
        flags=list(FLAGS),
        num_cpus=_CPUS / 4,  # so that one may come while another one has not gone
        upscale_delay_s=1.0,
        downscale_delay_s=10.0,
    )


def measure(
    also: Callable[[Cluster], None] = lambda _: None,
    kills: int = KILLS,
    roles: Sequence[str] = ROLES,
) -> Found:
    """Measures everything on a cluster of its own.

    Args:
        also: Called once the first replica serves.
        kills: As of `faults`.
        roles: As of `agree`, one after the other.

    Raises:
        NotReady: The cluster does not come up.
    """
    where = machine()
    with local_cluster(cpus=_CPUS) as cluster:
        ready = cluster.deploy(settings())
        also(cluster)
        alone = asyncio.run(_alone(cluster))
        text = alone[-1].text
        up = _scaled(cluster, 1, 2, MANY, text)
        killed = lost(cluster, signal.SIGKILL)
        down = _scaled(cluster, 2, 1, FEW, text)
        drained = drain(cluster)
        frozen = freeze(cluster)
        moved = apart(cluster, settings(2, 0))
        faulty = faults(cluster, kills)
        sent = ahead(cluster, settings(2, 0), kills // 4)
        agreed = tuple(agree(cluster, settings(2, 0), each) for each in roles)
    ttft = statistics.median(each.ttft or 0.0 for each in alone)
    return Found(where, ready, ttft, up, killed, down, drained, frozen, moved, faulty, sent, agreed)


async def _alone(cluster: Cluster) -> list[Stream]:
    async with client(cluster.http) as api:
        return [await stream(api, MODEL, TOKENS) for _ in range(ALONE)]


class _Asking:
    """Clients that keep calling in a thread, within `with`. calls: those that have ended."""

    def __init__(self, cluster: Cluster, clients: int) -> None:
        self.calls: list[Stream] = []
        self._over = threading.Event()

        async def ask() -> None:
            async with client(cluster.http) as api:
                await until(api, MODEL, TOKENS, clients, self._over.is_set, self.calls)

        self._thread = threading.Thread(target=lambda: asyncio.run(ask()))

    def __enter__(self) -> _Asking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def _scaled(cluster: Cluster, before: int, after: int, clients: int, text: str) -> Scaled:
    with _Asking(cluster, clients) as asking:
        what = f"{before} replicas become {after}"
        seconds = cluster.wait(lambda: cluster.replicas() == after, what, _SCALE_S)
    calls = asking.calls
    failed = sum(bool(call.error) for call in calls)
    wrong = sum(call.text != text for call in calls if not call.error)
    return Scaled((before, after), seconds, len(calls), failed, wrong)


def lost(cluster: Cluster, by: signal.Signals) -> Killed:
    """Sends one of two replicas this signal, which ends it or stops it, under streams."""
    cluster.wait(lambda: len(cluster.processes()) == 2, "no others")
    victim = cluster.processes()[0]
    texts = [each.text for each in asyncio.run(mixed(cluster, len(SEEDS), TOKENS))]
    kill = functools.partial(os.kill, victim, by)
    _both_asked(cluster)
    try:
        ended, began = asyncio.run(mixed(cluster, STREAMS, TOKENS, BEGUN, kill)), time.monotonic()
        with _Asking(cluster, MANY):
            wait_replaced(cluster, victim, _SCALE_S)
    finally:
        if by == signal.SIGSTOP and victim in cluster.processes():
            os.kill(victim, signal.SIGKILL)
    outcomes = Counter(each.outcome for each in ended)
    expected = [texts[number % len(SEEDS)] for number in range(STREAMS)]
    cut = [each for each in ended if each.error]
    stayed = [each.gap for each in ended if not each.moved]
    return Killed(
        streams=STREAMS,
        begun=BEGUN,
        whole=outcomes["whole"],
        cut=outcomes["cut"],
        failed=outcomes["failed"],
        wrong=sum(
            not text.startswith(each.text) if each.error else text != each.text
            for each, text in zip(ended, expected, strict=True)
        ),
        errors=tuple(sorted({each.error for each in cut})),
        recovered=time.monotonic() - began,
        moved=sum(each.moved > 0 for each in ended),
        gap=max((each.gap for each in ended if each.moved), default=0.0),
        usual_gap=max(stayed, default=0.0),
    )


def _both_asked(cluster: Cluster) -> None:
    """Asks until each of two replicas has its share of the calls: the router does not know a new
    one at once."""
    before = metrics(cluster, _WRITTEN)

    def both() -> bool:
        written = metrics(cluster, _WRITTEN)
        return sum(written[name] - before[name] >= _SHARE for name in written) == 2

    with _Asking(cluster, MANY):
        cluster.wait(both, "calls of two replicas", _SCALE_S)


def drain(cluster: Cluster) -> Drained:
    """Removes one of two replicas under long streams."""
    cluster.deploy(settings(2, 0))
    _both_asked(cluster)
    times: list[float] = []

    def remove() -> None:
        began = time.monotonic()
        cluster.scale(1)
        cluster.wait(lambda: len(cluster.processes()) == 1, "one of two ends", _SCALE_S)
        times.append(time.monotonic() - began)

    removing = threading.Thread(target=remove)
    asked = functools.partial(mixed, cluster, LONG, LONG_TOKENS, alike=False)
    ended = asyncio.run(asked(BEGUN, removing.start))
    removing.join()
    expected = [each.text for each in asyncio.run(asked())]
    return Drained(
        streams=LONG,
        tokens=LONG_TOKENS,
        whole=sum(not each.error for each in ended),
        failed=sum(bool(each.error) for each in ended),
        wrong=sum(each.text != text for each, text in zip(ended, expected, strict=True)),
        moved=sum(each.moved > 0 for each in ended),
        seconds=times[0],
        longest=max(each.seconds for each in ended),
        gap=max((each.gap for each in ended if each.moved), default=0.0),
        usual_gap=max((each.gap for each in ended if not each.moved), default=0.0),
    )


def freeze(cluster: Cluster) -> Killed:
    """Stops one of two replicas under streams."""
    cluster.deploy(settings(2, 0))
    return lost(cluster, signal.SIGSTOP)


def lines(found: Found) -> list[str]:
    """The report, for people."""
    told = [f"one replica serves after {found.ready:.1f} s; median TTFT {1000 * found.ttft:.0f} ms"]
    for killed, what in ((found.killed, "killed"), (found.frozen, "stopped")):
        told.append(
            f"one of two {what} under {killed.streams} streams: {killed.whole} whole, "
            f"{killed.cut} cut off with what they had, {killed.failed} failed, {killed.wrong} "
            f"wrong; replaced after {killed.recovered:.1f} s; {killed.moved} moved, with gaps of "
            f"at most {killed.gap:.2f} s, {killed.usual_gap:.2f} s without"
        )
    for scaled in (found.up, found.down):
        one, other = scaled.replicas
        told.append(
            f"{one} to {other} replicas in {scaled.seconds:.1f} s: {scaled.calls} calls, "
            f"{scaled.failed} failed, {scaled.wrong} wrong"
        )
    drained = found.drained
    told.append(
        f"one of two removed under {drained.streams} streams of {drained.tokens} tokens, of which "
        f"the longest took {drained.longest:.1f} s: its process ended after {drained.seconds:.1f} "
        f"s; {drained.moved} moved, {drained.failed} failed, {drained.wrong} wrong; gaps of at "
        f"most {drained.gap:.2f} s, {drained.usual_gap:.2f} s without"
    )
    moved, faulty = found.apart, found.faults
    told.append(
        f"prompts at one, decodes at the other: {moved.moved} of {moved.streams} moved, "
        f"{moved.whole} whole, {moved.wrong} wrong; gaps of at most {moved.gap:.2f} s, "
        f"{moved.usual_gap:.2f} s without"
    )
    told.append(
        f"either of them killed {faulty.kills} times meanwhile: {faulty.whole} of {faulty.streams} "
        f"streams whole, {faulty.wrong} wrong, {faulty.moves} moves, gaps of at most "
        f"{faulty.gap:.2f} s; {faulty.left} blocks or slots of host memory still in use"
    )
    sent = found.ahead
    told.append(
        f"caches sent ahead: {sent.moved} of {sent.requests} requests moved, {sent.cached} of them "
        f"with their caches, {sent.whole} whole, {sent.wrong} wrong; gaps of at most "
        f"{sent.gap:.2f} s, {sent.usual_gap:.2f} s without; of {sent.kills * sent.requests} more "
        f"under {sent.kills} kills {sent.killed_whole} whole, {sent.killed_wrong} wrong"
    )
    told += [
        f"roles {each.roles or 'as the router decides'}: of {each.requests} requests {each.live} "
        f"moved, {each.simulated} in the simulation, {each.same} did the same, {each.again} in "
        "another live run"
        for each in found.agreed
    ]
    return told


def main(argv: Sequence[str] | None = None, run: Callable[[], Found] = measure) -> int:
    """Runs the command. Exit code 2 for an output that cannot be written."""
    parser = Parser(prog="python -m jaxserve_lab.experiments.scale_live", description=__doc__)
    parser.add_argument("--out", metavar="FILE", default="", help="numbers as JSON")
    args = parser.parse_args(argv)
    if args.out:
        try:
            check_file("out", Path(args.out))
        except ValueError as error:
            parser.error(str(error))
    found = run()
    print("\n".join(lines(found)))
    if args.out:
        Path(args.out).write_text(json.dumps(asdict(found), indent=2) + "\n")
    return 0
