"""What the page says: its tables, its figures, and sentences that the numbers have to carry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

from jaxserve.experiments.common.claims import Section, listed, table
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.scale.cell import (
    POLICY,
    SCENES,
    SLOWDOWN,
    SYSTEM,
    Case,
    Cost,
    Decision,
    Found,
    Numbers,
    most,
)
from jaxserve.experiments.scale.grid import OTHERS, Scale
from jaxserve.experiments.scale.traffic import KINDS, TBT
from jaxserve.sched.routing.routers import ROUTERS

Results = Mapping[Case, Found]
ENOUGH = 50e-6  # seconds of a decision at the most replicas
SAME = 0.01  # of attainment
WORDS = {
    "live": "seen as they are",
    "published": "as published",
    "stale": "stale",
    "slow": "one slow",
    "dead": "one dead",
}


def introduction(scale: Scale, azure: str) -> list[str]:
    """The page's first paragraphs."""
    published, stale = SCENES["published"], SCENES["stale"]
    source = "the hours' own requests" if azure else "hours drawn with their moments"
    targets = ", ".join(f"{kind.ttft:g} s for {kind.name}" for kind in KINDS)
    return [
        f"Each run serves {scale.requests:,} requests of the two Azure hours (2023), {source}, "
        "many times beside each other and one after the other, each time from another minute on, "
        "so that bursts of one stream meet lulls of another. Replicas are Llama-3-8B on an "
        f"A100-80G (`{SYSTEM}`) under `{POLICY}`, chunks of 512 tokens, at most 256 requests a "
        "batch. "
        f"Targets: TTFT {targets}; P99 of a request's TBTs {TBT:g} s. Load: of what all replicas "
        "serve when there is always something to do, all requests of the hours at once, "
        f"{most(azure):.2f} requests/s each.",
        "Routers decide from snapshots, with what they have sent themselves since. Unless the "
        f"table says otherwise a replica publishes one every {published.interval:g} s, which takes "
        f"{published.age:g} s and is lost in {published.loss:.0%} of the cases; *stale*: every "
        f"{stale.interval:g} s, {stale.age:g} s, {stale.loss:.0%}; *seen as they are*: the "
        "replica's state of that moment. *One slow*: after a third of the requests one replica "
        f"takes {SLOWDOWN:g} times as long for every step; *one dead*: it dies, and the router "
        "notices a second later. The decisions are those of `jaxserve/sched/routing/`: the "
        "simulator has no routers of its own.",
    ]


def sections(
    scale: Scale, azure: str, results: Results, figures: Path, *, checked: bool
) -> list[Section]:
    """The page's. checked: ValueError where a sentence does not hold."""
    tell = _Tell(scale, azure, results, checked)
    return [
        tell.loads(figures),
        tell.shorter(),
        tell.scenes(),
        tell.shards(),
        tell.decisions(figures),
        tell.speed(),
    ]


class _Tell:
    def __init__(self, scale: Scale, azure: str, results: Results, checked: bool) -> None:
        self._scale, self._azure, self._results, self._checked = scale, azure, results, checked

    def _of(self, router: str, replicas: int, load: float, scene: str = "published") -> Numbers:
        found = self._results[self._scale.cell(router, replicas, load, scene, self._azure)]
        assert isinstance(found, Numbers)
        return found

    def _claim(self, holds: bool, text: str) -> str:
        if self._checked and not holds:
            raise ValueError(f"the numbers do not carry it any more: {text}")
        return text

    def loads(self, figures: Path) -> Section:
        """By replicas and load."""
        scale = self._scale
        rows, gains = [], {}
        for replicas in scale.replicas:
            for load in scale.loads:
                found = {router: self._of(router, replicas, load) for router in ROUTERS}
                cells = [f"{100 * n.attainment:.2f}; {n.p99:.2f} s" for n in found.values()]
                rows.append([f"{replicas}", f"{load:.0%}", *cells])
                best = max(n.attainment for name, n in found.items() if name != "slo")
                gains[(replicas, load)] = found["slo"].attainment - best
        worst, top = min(gains, key=lambda k: gains[k]), max(gains, key=lambda k: gains[k])
        notes = [
            table(["replicas", "load", *(f"`{name}`" for name in ROUTERS)], rows),
            self._claim(
                gains[worst] >= -SAME,
                "`slo` attains at least as much as the best of the others everywhere, to a "
                f"point: {100 * gains[top]:+.1f} points at most (at {top[0]} replicas and "
                f"{top[1]:.0%}), {100 * gains[worst]:+.1f} at least (at {worst[0]} and "
                f"{worst[1]:.0%}). Requests count alike for `least_loaded` and `two_choices`; "
                "a prompt of the code hour takes as long as many chats.",
            ),
        ]
        self._chart(figures)
        caption = "Attainment and P99 TTFT by load, for 8, 64 and 512 replicas"
        return Section(
            "By load",
            "Requests within all of their targets, percent; P99 TTFT.",
            [],
            [("scale-load.png", caption)],
            notes,
        )

    def shorter(self) -> Section:
        """Before the most replicas, with fewer requests."""
        scale, rows, gains = self._scale, [], []
        replicas, high = scale.replicas[-1], scale.loads[-1]
        for load, few in product(scale.loads, (True, False)):
            found = {}
            for router in ROUTERS:
                short = self._results[scale.shorter(router, load, self._azure)]
                assert isinstance(short, Numbers)
                found[router] = short if few else self._of(router, replicas, load)
            cells = [f"{100 * n.attainment:.2f}; {n.p99:.2f} s" for n in found.values()]
            requests = f"{scale.few if few else scale.requests:,}"
            rows.append([f"{load:.0%}", requests, *cells])
            best = max(n.attainment for name, n in found.items() if name != "slo")
            gains.append(found["slo"].attainment - best)
        rate = high * replicas * most(self._azure)
        text = (
            f"At {high:.0%} load {replicas} replicas get {scale.few:,} requests in "
            f"{scale.few / rate:.0f} s, too few to see where a queue ends; {scale.requests:,} in "
            f"{scale.requests / rate:.0f} s."
        )
        notes = [
            table(["load", "requests", *(f"`{name}`" for name in ROUTERS)], rows),
            self._claim(
                min(gains) >= -SAME,
                f"At {high:.0%}, `slo` is ahead of the best of the others by "
                f"{100 * gains[-2]:.1f} points with the fewer, and by {100 * gains[-1]:.1f} with "
                "the more.",
            ),
        ]
        return Section("How many requests it takes to see it", text, [], [], notes)

    def _chart(self, figures: Path) -> None:
        scale = self._scale

        def row(
            title: str, label: str, value: Callable[[Numbers], float], log: bool
        ) -> list[Panel]:
            return [
                Panel(
                    f"{title}, {replicas} replicas",
                    label,
                    {
                        router: (
                            [100 * load for load in scale.loads],
                            [value(self._of(router, replicas, load)) for load in scale.loads],
                        )
                        for router in ROUTERS
                    },
                    log_y=log,
                )
                for replicas in scale.replicas
            ]

        panels = [
            row("attainment", "%", lambda n: 100 * n.attainment, False),
            row("P99 TTFT", "s", lambda n: n.p99, True),
        ]
        chart(figures / "scale-load.png", panels, "load, %", log_x=False)

    def scenes(self) -> Section:
        """Snapshots, and replicas that are not as the others."""
        scale = self._scale
        rows: list[list[str]] = []
        slow = {
            router: [self._of(router, n, scale.load, "slow").p99 for n in scale.replicas]
            for router in ("round_robin", "slo")
        }
        for replicas in scale.replicas:
            for scene in ("live", "published", *OTHERS[1:]):
                found = {name: self._of(name, replicas, scale.load, scene) for name in ROUTERS}
                cells = [
                    f"{100 * n.attainment:.2f}; {n.p99:.2f} s"
                    + (f"; {n.failed} failed" if scene == "dead" else "")
                    for n in found.values()
                ]
                rows.append([f"{replicas}", WORDS[scene], *cells])
        stale = max(
            self._of("slo", replicas, scale.load, "live").attainment
            - self._of("slo", replicas, scale.load, "stale").attainment
            for replicas in scale.replicas
        )
        notes = [
            table(["replicas", "", *(f"`{name}`" for name in ROUTERS)], rows),
            self._claim(
                all(a <= b for a, b in zip(slow["slo"], slow["round_robin"], strict=True)),
                "With a slow replica the P99 TTFT of `round_robin`, which goes on as before, is "
                f"{listed(tuple(f'{p99:,.1f}' for p99 in slow['round_robin']))} s, of `slo` "
                f"{listed(tuple(f'{p99:,.1f}' for p99 in slow['slo']))} s with "
                f"{listed(scale.replicas)} replicas: its snapshots say how long its steps take. "
                "Where all are overloaded, as 8 replicas are whenever a burst of code comes, "
                "`round_robin` may attain more all the same: it gives up whom the slow one gets. "
                f"Stale snapshots cost `slo` {100 * stale:.1f} points at most.",
            ),
            "Of a dead replica's requests those without a token are served elsewhere, once; the "
            "others end with what they have, the *failed* ones. Nobody is served twice.",
        ]
        title = "Snapshots that are late, a slow replica, a dead one"
        text = f"At {scale.load:.0%} load: requests within all of their targets, percent; P99 TTFT."
        return Section(title, text, [], [], notes)

    def shards(self) -> Section:
        """Several routers."""
        scale, rows = self._scale, []
        losses = {}
        for routers in scale.shards:
            cells = []
            for router in ROUTERS:
                n = self._results[scale.sharded(router, routers, self._azure)]
                assert isinstance(n, Numbers)
                cells.append(f"{100 * n.attainment:.2f}; {n.p99:.2f} s")
                losses[router, routers] = n.attainment
            rows.append([f"{routers}", f"{scale.replicas[-1] // routers}", *cells])
        few, many = scale.shards[0], scale.shards[-1]
        lost = losses["slo", few] - losses["slo", many]
        notes = [
            table(["routers", "replicas each", *(f"`{name}`" for name in ROUTERS)], rows),
            self._claim(
                losses["slo", many] >= losses["round_robin", many] - SAME,
                f"`slo` loses {100 * lost:.1f} points from {few} router to {many}, each of which "
                f"knows {scale.replicas[-1] // many} replicas and has the {many}th part of the "
                "requests: what is short in one sample is free in another, and nobody sees it.",
            ),
        ]
        text = (
            f"Disjoint samples of {scale.replicas[-1]} replicas at {scale.loads[-1]:.0%} load, "
            "every router with its own part of the requests: no state is shared, and no lock. "
            "Requests within all of their targets, percent; P99 TTFT."
        )
        return Section("Where one router ends: several", text, [], [], notes)

    def decisions(self, figures: Path) -> Section:
        """What one costs."""
        scale, rows, lines = self._scale, [], {}
        for router in ROUTERS:
            costs = [self._cost(router, replicas) for replicas in scale.decisions]
            rows.append([f"`{router}`", *(f"{1e6 * cost:.0f}" for cost in costs)])
            lines[router] = ([float(n) for n in scale.decisions], [1e6 * cost for cost in costs])
        most_of_all = scale.replicas[-1] if scale.replicas[-1] in scale.decisions else None
        at = most_of_all or scale.decisions[-1]
        cost, rate = self._cost("slo", at), scale.loads[-1] * at * most(self._azure)
        chart(
            figures / "scale-decision.png",
            [[Panel("one decision", "µs", lines)]],
            "replicas",
        )
        share = cost * rate
        notes = [
            table(["", *(f"{n} replicas, µs" for n in scale.decisions)], rows),
            f"At {at} replicas `slo` takes {1e6 * cost:.0f} µs of the {1e6 * ENOUGH:.0f} µs that "
            f"were aimed at, so one router in Python makes {1 / cost:,.0f} decisions a second at "
            f"most, beside its other work. The replicas serve {rate:,.0f} requests a second then, "
            f"{share:.0%} of a core. It grows with the replicas, as every one is looked at, and "
            "the requests grow with them: several times as many replicas are for several routers, "
            "see above, each with as many as one core can look at.",
        ]
        text = (
            "CPU time of a decision in Python, with what is noted of it, median of 1,000, on the "
            "machine that made the page."
        )
        figure = ("scale-decision.png", "CPU time of a decision by number of replicas")
        return Section("What a decision costs", text, [], [figure], notes)

    def _cost(self, router: str, replicas: int) -> float:
        found = self._results[Decision(router, replicas)]
        assert isinstance(found, Cost)
        return found.seconds

    def speed(self) -> Section:
        """Of the simulation."""
        scale = self._scale
        slowest = {
            replicas: min(
                self._of(router, replicas, load).per_s for router in ROUTERS for load in scale.loads
            )
            for replicas in scale.replicas
        }
        text = (
            f"Requests simulated in a second of one core's time, the least over routers and loads: "
            f"{listed(tuple(f'{rate:,.0f}' for rate in slowest.values()))} for "
            f"{listed(scale.replicas)} replicas."
        )
        return Section("The simulation itself", text, [], [], [])
