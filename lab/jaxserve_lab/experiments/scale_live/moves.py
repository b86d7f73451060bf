"""Streams that move while replicas are well, and replicas that are killed at any moment of that."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import signal
import threading
import urllib.request
from dataclasses import dataclass

from jaxserve.deploy.local.cluster import Cluster, NotReady
from jaxserve.deploy.settings import Settings
from jaxserve_lab.experiments.scale_live.streams import (
    LONG_PROMPT,
    TIMEOUT_S,
    Stream,
    metric,
    mixed,
    wait_replaced,
)

MOVING, MOVING_TOKENS = 40, 48
AT_ONCE = 12  # streams under which a replica is killed
FREE_S = 30.0
WITHIN_S = 0.3  # of their first piece
LINK = "2ms:5ms"


@dataclass(frozen=True)
class Apart:
    """What became of streams when one replica computes prompts, and the other what follows.

    Attributes:
        streams: How many there were.
        whole: Those that got all of their text.
        wrong: Those whose text is not what it should be.
        moved: Those that went on at the other replica.
        gap: Longest time that one of them had between two pieces, in seconds.
        usual_gap: The same without roles, where none moves.
    """

    streams: int
    whole: int
    wrong: int
    moved: int
    gap: float
    usual_gap: float


@dataclass(frozen=True)
class Faults:
    """What became of streams that move when replicas were killed at random moments.

    Attributes:
        kills: How many.
        streams: How many there were, under all kills.
        whole: Those that got all of their text.
        wrong: Those whose text, whole or cut, is not what it should be.
        errors: The different errors.
        moves: How often they went on at another replica.
        gap: Longest time that one of them had between two pieces, in seconds.
        left: Blocks and slots of host memory that were still in use in the end.
    """

    kills: int
    streams: int
    whole: int
    wrong: int
    errors: tuple[str, ...]
    moves: int
    gap: float
    left: int


def apart(cluster: Cluster, plain: Settings) -> Apart:
    """Serves streams by two replicas with roles, and without. plain: settings of the latter; those
    with roles stay deployed."""
    ask = functools.partial(mixed, cluster, MOVING, MOVING_TOKENS, alike=False, prompt=LONG_PROMPT)
    cluster.deploy(plain)
    asyncio.run(ask())  # whatever takes longer at first
    stayed = asyncio.run(ask())
    cluster.deploy(plain.model_copy(update={"link": LINK, "roles": "1:1"}))
    asyncio.run(ask())
    moved = asyncio.run(ask())
    return Apart(
        streams=MOVING,
        whole=sum(not each.error for each in moved),
        wrong=sum(one.text != other.text for one, other in zip(moved, stayed, strict=True)),
        moved=sum(each.moved > 0 for each in moved),
        gap=max(each.gap for each in moved),
        usual_gap=max(each.gap for each in stayed),
    )


def _held(cluster: Cluster) -> int:
    """Blocks and slots of host memory that are in use, without what prefix caches keep."""
    reset = urllib.request.Request(
        cluster.http.removesuffix("v1") + "reset_prefix_cache", method="POST"
    )
    urllib.request.urlopen(reset, timeout=TIMEOUT_S).close()
    return int(metric(cluster, "num_blocks_used") + metric(cluster, "num_host_slots_used"))


def faults(cluster: Cluster, kills: int) -> Faults:
    """Kills either replica while streams move from one to the other. kills: how often."""
    ask = functools.partial(mixed, cluster, tokens=MOVING_TOKENS, prompt=LONG_PROMPT)
    expected = [each.text for each in asyncio.run(ask(AT_ONCE))]
    drawn, ended = random.Random(0), list[list[Stream]]()
    for _ in range(kills):
        victim = drawn.choice(cluster.processes())
        timer = threading.Timer(drawn.uniform(0, WITHIN_S), os.kill, (victim, signal.SIGKILL))
        ended.append(asyncio.run(ask(AT_ONCE, when=1, then=timer.start)))
        timer.join()
        wait_replaced(cluster, victim)
    right = [
        text.startswith(one.text) if one.error else one.text == text
        for each in ended
        for one, text in zip(each, expected, strict=True)
    ]
    cluster.wait(lambda: not metric(cluster, "num_requests"), "the engines have nothing to do")
    with contextlib.suppress(NotReady):  # as the result says
        cluster.wait(lambda: not _held(cluster), "all blocks are free", FREE_S)
    streams = [one for each in ended for one in each]
    return Faults(
        kills=kills,
        streams=len(streams),
        whole=sum(not each.error for each in streams),
        wrong=right.count(False),
        errors=tuple(sorted({each.error for each in streams if each.error})),
        moves=sum(each.moved for each in streams),
        gap=max(each.gap for each in streams),
        left=_held(cluster),
    )
