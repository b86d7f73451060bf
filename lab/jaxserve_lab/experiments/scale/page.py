"""Makes docs/scale.md: many replicas behind one stream of requests, simulated.

    python -m jaxserve_lab.experiments.scale --azure=DIR

--azure: the folder of the two hours of the Azure public dataset; without it, they are drawn with
the hours' moments. --requests: of each run; --few: of shorter ones before the most replicas, one at
each load. A million take some 12 s of one core, and 2.2 GB of memory a process. Needs numba.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from jaxserve.sched.routing.routers import ROUTERS as ALL_ROUTERS
from jaxserve_lab.experiments.common.figures import panel
from jaxserve_lab.experiments.common.page import Page, flags, listed, table, write_page
from jaxserve_lab.experiments.common.runs import Results
from jaxserve_lab.experiments.scale.apart import (
    BYTES_PER_S,
    LATENCY,
    LONG,
    LONG_TBT,
    LONG_TTFT,
    SHARES,
    WAYS,
    WORK,
    Apart,
    ServedApart,
)
from jaxserve_lab.experiments.scale.apart import SLOWDOWN as SLOWED
from jaxserve_lab.experiments.scale.cell import (
    KINDS_OF,
    MOVES,
    POLICY,
    SCENES,
    SLOWDOWN,
    SYSTEM,
    Case,
    Cell,
    Cost,
    Decision,
    Found,
    Numbers,
    most,
    run,
)
from jaxserve_lab.experiments.scale.talks import (
    TALK_POLICY,
    TALK_RATE,
    TALK_ROUTERS,
    TALK_SYSTEM,
    TALK_TBT,
    TALK_TTFT,
    Said,
    Talk,
)
from jaxserve_lab.experiments.scale.traffic import KINDS, TBT, check_folder

# Without prefixes to look at, `prefix_affinity` is `least_loaded`.
ROUTERS = [name for name in ALL_ROUTERS if name != "prefix_affinity"]
LIVE = "scale-live.json"  # of `jaxserve_lab.experiments.scale_live`
ENOUGH = 50e-6  # seconds of a decision at the most replicas
ENOUGH_FOUND = 60e-6  # the same with prefixes
MORE_WITH_LINK = 1.2  # times as long as without
SAME = 0.01  # of attainment
WORDS = {
    "live": "seen as they are",
    "published": "as published",
    "stale": "stale",
    "slow": "one slow",
    "dead": "one dead",
}


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        requests: Of each run.
        replicas: Fleet sizes.
        loads: For snapshots as published.
        load: For the other scenes.
        shards: Numbers of routers before the largest fleet, at the highest load.
        decisions: Numbers of replicas for which a decision's cost is measured.
        few: Requests of the short runs on the largest fleet, one at each load.
        talks: Requests of conversations for each replica, by fleet size.
        apart: Requests that may move, by number of replicas.
    """

    requests: int = 1_000_000
    replicas: tuple[int, ...] = (8, 64, 512)
    loads: tuple[float, ...] = (0.6, 0.8, 0.95)
    load: float = 0.8
    shards: tuple[int, ...] = (1, 8, 64)
    decisions: tuple[int, ...] = (8, 64, 512, 1024)
    few: int = 100_000
    talks: tuple[int, ...] = (120, 40, 16)
    apart: tuple[tuple[int, int], ...] = ((8, 1_000), (64, 4_800))


QUICK = Scale(2_000, (2, 4), (0.6, 0.8), 0.6, (1, 2), (4, 8), 1_000, (10, 10), ((4, 60),))


class Fleets(Page[Case, Found]):
    """What the template beside this asks for.

    Args:
        scale: how much is run.
        results: of the runs.
        azure: as `Cell` has it.
        command: that makes the page.
        figures: the folder that may have LIVE.
        checked: ValueError where a sentence does not hold.
    """

    name = "scale"
    rules = "the rules `jaxserve`; conversations with prefix caching, all others without"
    scale: Scale
    held = (
        *(Cell(router, 8, 0.8, "published", 1000) for router in ROUTERS),
        *(Cell("slo", 8, 0.8, scene, 1000) for scene in ("stale", "slow", "dead")),
        Talk("slo", 4, 40),
    )
    kinds, tbt, slowdown, scenes_of, same, enough = KINDS, TBT, SLOWDOWN, SCENES, SAME, ENOUGH
    system, policy = SYSTEM, POLICY
    talk_system, talk_policy, talk_rate = TALK_SYSTEM, TALK_POLICY, TALK_RATE
    talk_ttft, talk_tbt, enough_found = TALK_TTFT, TALK_TBT, ENOUGH_FOUND
    link, latency, long_ttft, long_tbt = BYTES_PER_S, LATENCY, LONG_TTFT, LONG_TBT
    slowed, more_with_link = SLOWED, MORE_WITH_LINK

    def __init__(
        self,
        scale: Scale,
        results: Results[Case, Found],
        azure: str = "",
        command: str = "",
        figures: Path = Path(),
        *,
        checked: bool = False,
    ) -> None:
        super().__init__(scale, results)
        self.azure, self.command, self._figures, self._checked = azure, command, figures, checked

    def claim(self, holds: bool, caller: Callable[[], str]) -> str:
        """The sentence of a template's call block. ValueError if the numbers do not support it."""
        text = caller()
        if self._checked and not holds and self.results.complete:
            raise ValueError(f"the numbers do not carry it any more: {text}")
        return text

    def most(self) -> float:
        """Requests a second that one replica serves."""
        return most(self.azure)

    def numbers_of(
        self, router: str, replicas: int, load: float, scene: str = "published", **more: Any
    ) -> Numbers:
        """The numbers of a run.

        Args:
            router, replicas, load, scene: As `Cell` has them.
            **more: Other fields of `Cell`.
        """
        cell = Cell(router, replicas, load, scene, self.scale.requests, azure=self.azure)
        found = self.results[replace(cell, **more)]
        assert isinstance(found, Numbers)
        return found

    def few(self, router: str, load: float) -> Numbers:
        """On the largest fleet, with fewer requests."""
        return self.numbers_of(router, self.scale.replicas[-1], load, requests=self.scale.few)

    def sharded(self, router: str, routers: int) -> Numbers:
        """Several routers before the largest fleet."""
        return self.numbers_of(
            router, self.scale.replicas[-1], self.scale.loads[-1], routers=routers
        )

    def gains(self) -> dict[tuple[int, float], float]:
        """How far `slo` is ahead of the best other router, by replicas and load."""
        return {
            (replicas, load): _gain(
                lambda router, at=(replicas, load): self.numbers_of(router, *at)
            )
            for replicas, load in product(self.scale.replicas, self.scale.loads)
        }

    def loads(self) -> str:
        """By replicas and load."""
        rows = [
            [
                f"{n}",
                f"{load:.0%}",
                *_cells(lambda router, at=(n, load): self.numbers_of(router, *at)),
            ]
            for n, load in product(self.scale.replicas, self.scale.loads)
        ]
        return table(["replicas", "load", *_names()], rows)

    def by_load(self) -> str:
        """A figure."""
        panels = [
            [
                panel(
                    f"{title}, {replicas} replicas",
                    label,
                    list(ROUTERS),
                    self.scale.loads,
                    lambda router, load, n=replicas, value=value: value(
                        self.numbers_of(router, n, load)
                    ),
                    100,
                    log_y=log_y,
                )
                for replicas in self.scale.replicas
            ]
            for title, label, value, log_y in (
                ("attainment", "%", lambda n: 100 * n.attainment, False),
                ("P99 TTFT", "s", lambda n: n.p99, True),
            )
        ]
        caption = "Attainment and P99 TTFT by load, for 8, 64 and 512 replicas"
        return self.chart("scale-load.png", caption, panels, "load, %", log_x=False)

    def shorter(self) -> tuple[str, list[float]]:
        """With fewer requests and with all, and what `slo` gains in each line."""
        scale, rows, gains = self.scale, [], []
        for load, few in product(scale.loads, (True, False)):

            def of(router: str, load: float = load, few: bool = few) -> Numbers:
                more = self.few(router, load)
                return more if few else self.numbers_of(router, scale.replicas[-1], load)

            rows.append([f"{load:.0%}", f"{scale.few if few else scale.requests:,}", *_cells(of)])
            gains.append(_gain(of))
        return table(["load", "requests", *_names()], rows), gains

    def scenes(self) -> str:
        """Snapshots, and replicas that are not as the others."""
        rows = []
        for replicas, scene in product(self.scale.replicas, WORDS):

            def of(router: str, at: tuple[int, str] = (replicas, scene)) -> Numbers:
                return self.numbers_of(router, at[0], self.scale.load, at[1])

            cells = _cells(of)
            if scene == "dead":
                failed = (of(router).failed for router in ROUTERS)
                cells = [f"{cell}; {n} failed" for cell, n in zip(cells, failed, strict=True)]
            rows.append([f"{replicas}", WORDS[scene], *cells])
        return table(["replicas", "", *_names()], rows)

    def _slow(self, router: str) -> list[float]:
        """P99 TTFTs with a slow replica, by replicas."""
        return [
            self.numbers_of(router, n, self.scale.load, "slow").p99 for n in self.scale.replicas
        ]

    def slow(self, router: str) -> str:
        """The same as in a sentence."""
        return listed([f"{p99:,.1f}" for p99 in self._slow(router)])

    def no_slower(self) -> bool:
        """Whether `slo` is not, than round robin."""
        both = zip(self._slow("slo"), self._slow("round_robin"), strict=True)
        return all(ours <= theirs for ours, theirs in both)

    def stale(self) -> float:
        """What stale snapshots cost `slo` at most."""
        return max(
            self.numbers_of("slo", replicas, self.scale.load, "live").attainment
            - self.numbers_of("slo", replicas, self.scale.load, "stale").attainment
            for replicas in self.scale.replicas
        )

    def shards(self) -> str:
        """Several routers."""
        rows = [
            [f"{n}", f"{self.scale.replicas[-1] // n}", *_cells(lambda r, n=n: self.sharded(r, n))]
            for n in self.scale.shards
        ]
        return table(["routers", "replicas each", *_names()], rows)

    def said(self, router: str, replicas: int) -> Said:
        """What comes of conversations. router: of TALK_ROUTERS."""
        each = self.scale.talks[self.scale.replicas.index(replicas)]
        found = self.results[Talk(router, replicas, replicas * each)]
        assert isinstance(found, Said)
        return found

    def talks(self) -> str:
        """Conversations, by replicas and router."""
        rows = []
        for replicas in self.scale.replicas:
            for router in TALK_ROUTERS:
                n = self.said(router, replicas)
                shares = [f"{100 * n.attainment:.1f}", f"{n.goodput:,.1f}"]
                shares += [f"{100 * n.found:.1f} of {100 * n.there:.1f}"]
                rows.append([f"{replicas}", f"`{router}`", *shares, f"{n.p50:.2f}; {n.p99:.2f} s"])
        columns = ("attained, %", "attained/s", "found, % of the prompts", "P50, P99 TTFT")
        return table(["replicas", "router", *columns], rows)

    def apart(
        self, work: str, replicas: int, rate: float, way: str | float, **more: bool
    ) -> ServedApart:
        """What comes of requests that move or not.

        Args:
            work, replicas, rate, way, more: As `Apart`.
        """
        count = dict(self.scale.apart)[replicas]
        azure = self.azure if work == "Azure" else ""
        found = self.results[Apart(work, replicas, rate, way, count, azure=azure, **more)]
        assert isinstance(found, ServedApart)
        return found

    def movable(self) -> str:
        """How many requests may move in each run, and on how many replicas."""
        return listed([f"{count:,} on {replicas} replicas" for replicas, count in self.scale.apart])

    def moved(self) -> str:
        """Prompts together with decodes, apart by a fixed share, and as the router decides."""
        rows = []
        for work, rates in WORK.items():
            for replicas, rate in product(dict(self.scale.apart), rates):
                split = {
                    share: self.apart(work, replicas, rate, share).attainment for share in SHARES
                }
                best = max(SHARES, key=lambda share: split[share])
                together, ours = (self.apart(work, replicas, rate, way) for way in WAYS[:2])
                prompts = math.ceil(best * replicas)
                shares = [f"{100 * together.attainment:.1f}", f"{100 * split[best]:.1f}"]
                shares += [f"{prompts}:{replicas - prompts}", f"{100 * ours.attainment:.1f}"]
                rows.append([work, f"{replicas}", f"{rate:g}", *shares])
        columns = ("together, %", "best fixed split, %", "which", "as the router decides, %")
        return table(["", "replicas", "requests/s each", *columns], rows)

    def moved_slow(self) -> str:
        """With a replica that becomes slow, together and as the router decides."""
        replicas, rows = self.scale.apart[0][0], []
        for work, rates in WORK.items():
            ways = [self.apart(work, replicas, rates[-1], way, slow=True) for way in WAYS[:2]]
            shares = [f"{100 * one.attainment:.1f}; {one.goodput:.1f}" for one in ways]
            rows.append([work, f"{rates[-1]:g}", *shares])
        columns = ("together, %; a second", "as the router decides, %; a second")
        return table(["", "requests/s each", *columns], rows)

    def moved_dead(self) -> ServedApart:
        """What comes of long prompts that move, if a replica dies."""
        rate = WORK[LONG][0]
        return self.apart(LONG, self.scale.apart[0][0], rate, "moves", dead=True)

    def gained(self, other: str) -> float:
        """What `slo` attains more than the other, at least over all fleets."""
        return min(
            self.said("slo", n).attainment - self.said(other, n).attainment
            for n in self.scale.replicas
        )

    def cost(self, router: str, replicas: int, move: str = "", *, prefixes: bool = False) -> float:
        """Seconds of a decision.

        Args:
            router, replicas, move, prefixes: As `Decision`.
        """
        found = self.results[Decision(router, replicas, prefixes, move)]
        assert isinstance(found, Cost)
        return found.seconds

    def decisions(self) -> str:
        """What one costs."""
        rows = [
            [f"`{name}`", *(f"{1e6 * self.cost(name, n):.0f}" for n in self.scale.decisions)]
            for name in ROUTERS
        ]
        for name in ("slo", "prefix_affinity"):
            costs = (self.cost(name, n, prefixes=True) for n in self.scale.decisions)
            rows.append([f"`{name}`, with prefixes", *(f"{1e6 * cost:.0f}" for cost in costs)])
        for move, what in MOVES.items():
            costs = (self.cost("slo", n, move) for n in self.scale.decisions)
            rows.append([f"`slo`, {what}", *(f"{1e6 * cost:.0f}" for cost in costs)])
        return table(["", *(f"{n} replicas, µs" for n in self.scale.decisions)], rows)

    def decided_at(self) -> int:
        """The replicas of which the page speaks."""
        most_of_all = self.scale.replicas[-1]
        return most_of_all if most_of_all in self.scale.decisions else self.scale.decisions[-1]

    def by_replicas(self) -> str:
        """A figure."""
        shown = panel(
            "one decision",
            "µs",
            list(ROUTERS),
            self.scale.decisions,
            lambda router, replicas: 1e6 * self.cost(router, replicas),
            log_y=True,
        )
        caption = "CPU time of a decision by number of replicas"
        return self.chart("scale-decision.png", caption, [[shown]], "replicas")

    def speeds(self) -> str:
        """Requests simulated in a second, at least, by replicas."""
        least = (
            min(
                self.numbers_of(router, n, load).per_s
                for router in ROUTERS
                for load in self.scale.loads
            )
            for n in self.scale.replicas
        )
        return listed([f"{rate:,.0f}" for rate in least])

    def live(self) -> dict[str, Any]:
        """What `jaxserve_lab.experiments.scale_live` has written; nothing without it."""
        path = self._figures / LIVE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _names() -> list[str]:
    return [f"`{name}`" for name in ROUTERS]


def _cells(of: Callable[..., Numbers]) -> list[str]:
    """Attainment and P99 TTFT, by router."""
    return [f"{100 * n.attainment:.2f}; {n.p99:.2f} s" for n in map(of, ROUTERS)]


def _gain(of: Callable[..., Numbers]) -> float:
    """By how much `slo` attains more than the best of the others."""
    return of("slo").attainment - max(of(name).attainment for name in ROUTERS if name != "slo")


def _command(args: Namespace) -> str:
    flags = [" --azure=DIR" if args.azure else ""]
    for name in ("requests", "few"):
        value = getattr(args, name)
        flags += [f" --{name}={value}" if value is not None else ""]
    return "python -m jaxserve_lab.experiments.scale" + "".join(flags)


def _make(args: Namespace, known: Path | None) -> Fleets:
    scale: Scale = QUICK if args.quick else Scale()
    for name in ("requests", "few"):
        value = getattr(args, name)
        if value is not None:
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
            scale = replace(scale, **{name: value})
    check_folder(args.azure)
    results: Results[Case, Found] = Results(run, lambda case: KINDS_OF[type(case)], known)
    figures = Path(args.out) / "figures"
    return Fleets(scale, results, args.azure, _command(args), figures, checked=not args.quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    parser = flags("scale", __doc__)
    parser.add_argument("--azure", metavar="DIR", default="", help="folder of the Azure traces")
    parser.add_argument("--requests", type=int, help="of each run (1000000; 2000 with --quick)")
    parser.add_argument("--few", type=int, help="of the short ones (100000; 1000 with --quick)")
    return write_page(parser, argv, _make)
