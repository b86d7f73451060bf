"""Which simulations the page is made of."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.experiments.scale.cell import Case, Cell, Decision
from jaxserve.sched.routing.routers import ROUTERS


@dataclass(frozen=True)
class Scale:
    """How much is run. requests: of each run; few: of shorter ones before the most replicas, one at
    each load. loads: with snapshots as published; the other scenes are at `load`.
    shards: numbers of routers before the most replicas, at the highest load. decisions: replicas
    among which a router chooses, for what that costs."""

    requests: int = 1_000_000
    replicas: tuple[int, ...] = (8, 64, 512)
    loads: tuple[float, ...] = (0.6, 0.8, 0.95)
    load: float = 0.8
    shards: tuple[int, ...] = (1, 8, 64)
    decisions: tuple[int, ...] = (8, 64, 512, 1024)
    few: int = 100_000

    def cell(self, router: str, replicas: int, load: float, scene: str, azure: str) -> Cell:
        """One of the grid's."""
        return Cell(router, replicas, load, scene, self.requests, azure=azure)

    def shorter(self, router: str, load: float, azure: str) -> Cell:
        """Before the most replicas, with fewer requests."""
        return Cell(router, self.replicas[-1], load, "published", self.few, azure=azure)

    def sharded(self, router: str, routers: int, azure: str) -> Cell:
        """Several routers before the most replicas."""
        most, high = self.replicas[-1], self.loads[-1]
        return Cell(router, most, high, "published", self.requests, routers, azure)


QUICK = Scale(2_000, (2, 4), (0.6, 0.8), 0.6, (1, 2), (4, 8), 1_000)
OTHERS = ("live", "stale", "slow", "dead")  # scenes at one load


def cases(scale: Scale, azure: str) -> set[Case]:
    """All of them. azure: as in `Cell`."""
    found: set[Case] = set()
    for router in ROUTERS:
        for replicas in scale.replicas:
            for load in scale.loads:
                found.add(scale.cell(router, replicas, load, "published", azure))
            for scene in OTHERS:
                found.add(scale.cell(router, replicas, scale.load, scene, azure))
        found |= {scale.shorter(router, load, azure) for load in scale.loads}
        found |= {scale.sharded(router, routers, azure) for routers in scale.shards}
        found |= {Decision(router, replicas) for replicas in scale.decisions}
    return found
