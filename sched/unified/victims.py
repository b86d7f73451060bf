"""Which requests may be preempted for others in a batch, and how many are needed."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.sched.unified.batch_budget import BatchBudget
from jaxserve.sched.unified.ranking import Ranking

Victim = tuple[int, int, int]  # a running request, its place, and the blocks that it frees


class Victims:
    """Running requests that may be preempted, the lowest in the ranking first. They are kept as
    Python numbers, since there are few and array operations would take longer."""

    def __init__(self, budget: BatchBudget, ranking: Ranking) -> None:
        self._budget, self._ranking = budget, ranking
        self._left: list[Victim] | None = None  # without decided ones at the end

    def behind(self, place: int) -> Iterator[Victim]:
        """Requests at that place in the ranking or behind it."""
        decided = self._budget.decided
        for victim in reversed(self._undecided()):
            if victim[1] < place:
                return
            if not decided[victim[0]]:
                yield victim

    def giving(self, place: int, blocks: int, *, slot: bool) -> list[Victim] | None:
        """The fewest requests at that place or behind it that free this many blocks, and a slot if
        one is needed. None if all of them do not free enough."""
        found = []
        for victim in self.behind(place):
            if not (slot or blocks > 0):
                break
            found.append(victim)
            blocks, slot = blocks - victim[2], False
        return None if slot or blocks > 0 else found

    def _undecided(self) -> list[Victim]:
        running, decided = self._ranking.running, self._budget.decided
        if self._left is None:
            places = self._ranking.place[running].tolist()
            gives = self._budget.view.pool.private(running).tolist()
            self._left = list(zip(running.tolist(), places, gives, strict=True))
        left = self._left
        while left and decided[left[-1][0]]:
            left.pop()
        return left
