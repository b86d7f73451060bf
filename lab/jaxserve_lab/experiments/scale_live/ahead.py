"""Streams that move over a slow link: their caches are sent ahead, while they go on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from dataclasses import dataclass

from jaxserve.deploy.local.cluster import Cluster
from jaxserve.deploy.settings import Settings
from jaxserve_lab.experiments.scale_live.streams import metric, wait_replaced
from jaxserve_lab.experiments.scale_live.talkers import Asked, Served, serve

LINK = "2ms:10s"
"""By which a router expects any cache to be under way for longer than a step."""
COUNT = 60  # requests


@dataclass(frozen=True)
class Ahead:
    """What became of requests with targets on two replicas, between which they move.

    Attributes:
        link: What the router is told to lie between them.
        requests: How many there were.
        whole: Those that got all of their text.
        wrong: Those whose text is not what it is without moves.
        moved: Those that went on at the other replica.
        cached: Those of them that found what they have cached there.
        sent: Caches that came before their requests.
        gap: Longest time that one of them had between two pieces, in seconds.
        usual_gap: The same of those that did not move.
        kills: How often one of the two was killed under as many requests again.
        killed_whole, killed_wrong: As `whole` and `wrong`, under all kills.
        errors: The different errors.
    """

    link: str
    requests: int
    whole: int
    wrong: int
    moved: int
    cached: int
    sent: int
    gap: float
    usual_gap: float
    kills: int
    killed_whole: int
    killed_wrong: int
    errors: tuple[str, ...]


def ahead(cluster: Cluster, plain: Settings, kills: int) -> Ahead:
    """Serves the requests by two replicas with a slow link, and kills one of them at a random
    moment.

    Args:
        cluster: Where they are served.
        plain: Settings of two replicas without a link.
        kills: How often.
    """
    asked, drawn = Asked.draw(COUNT), random.Random(0)
    cluster.deploy(plain)
    texts = [one.text for one in asyncio.run(serve(cluster, asked))]
    cluster.deploy(plain.model_copy(update={"link": LINK}))
    served, killed = asyncio.run(serve(cluster, asked)), list[Served]()
    sent = int(metric(cluster, "caches_ahead_total"))
    for _ in range(kills):
        victim = drawn.choice(cluster.processes())
        moment = drawn.uniform(0, asked.arrival[-1])
        timer = threading.Timer(moment, os.kill, (victim, signal.SIGKILL))
        timer.start()
        killed += asyncio.run(serve(cluster, asked))
        timer.join()
        wait_replaced(cluster, victim)
    moved = [one for one in served if one.moved]
    return Ahead(
        link=LINK,
        requests=COUNT,
        whole=_whole(served),
        wrong=_wrong(served, texts),
        moved=len(moved),
        cached=sum(one.cached > 0 for one in moved),
        sent=sent,
        gap=max((one.gap for one in moved), default=0.0),
        usual_gap=max((one.gap for one in served if not one.moved), default=0.0),
        kills=kills,
        killed_whole=_whole(killed),
        killed_wrong=_wrong(killed, texts * kills),
        errors=tuple(sorted({one.error for one in [*served, *killed] if one.error})),
    )


def _whole(served: list[Served]) -> int:
    return sum(not one.error for one in served)


def _wrong(served: list[Served], texts: list[str]) -> int:
    return sum(
        not text.startswith(one.text) if one.error else one.text != text
        for one, text in zip(served, texts, strict=True)
    )
