"""The drafter of a simulated replica: its requests' texts, as far as they can be guessed."""

from __future__ import annotations

import numpy as np

from jaxserve.sched.scheduler import Scheduler
from jaxserve.sched.speculation.acceptance import AcceptanceRates, RequestRates
from jaxserve.sched.speculation.choice import MOST
from jaxserve.simulator.replica.outputs import Outputs
from jaxserve.simulator.workloads.guessable import draw
from jaxserve.simulator.workloads.workload import Workload

SOURCE = "simulated"  # the drafter's name


class Guesses:
    """The texts of all requests of a workload, drawn once, by seed and number: they do not depend
    on plans or replicas.

    Args:
        workload: The requests, with how well each can be guessed.
        seed: Seed of the texts.

    Attributes:
        offered: bool [sum of output_len], tokens for which there is a guess, one request after the
        other.
        ahead: int64 [sum of output_len], number of consecutive tokens from each on that equal their
        guesses.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self.offered = np.zeros(int(workload.output_len.sum()), bool)
        self.ahead = np.zeros(len(self.offered), np.int64)
        begin = 0
        columns = (workload.guess_share, workload.guess_right, workload.output_len)
        for number, (share, right, count) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            mine = slice(begin, begin + count)
            if share:
                rng = np.random.default_rng((seed, 13, number))
                self.offered[mine], self.ahead[mine] = draw(share, right, count, rng)
            begin += count

    def __len__(self) -> int:
        return len(self.offered)


class Drafter:
    """Offers drafts to the scheduler and learns how often they are right, like the engine's
    drafters (`sched/speculation/acceptance.py`).

    Args:
        scheduler: Scheduler of the replica.
        guesses: Guesses of the workload's requests.
        outputs: Where the tokens of each begin.
    """

    def __init__(self, scheduler: Scheduler, guesses: Guesses, outputs: Outputs) -> None:
        self._scheduler, self._guesses, self._outputs = scheduler, guesses, outputs
        self._rates = AcceptanceRates()
        self._of: dict[int, RequestRates] = {}  # by row

    def begin(self, row: int, tenant: str) -> None:
        """Adds a request."""
        self._of[row] = self._rates.of(tenant)
        self._scheduler.offer(row, 0, 0.0)

    def right(self, requests: np.ndarray, before: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """How many of the requests' drafts are right, int64 [n].

        Args:
            requests: int64 [n], numbers.
            before: int64 [n], known tokens of each.
            drafts: int64 [n], number of drafts computed after them.
        """
        places = np.minimum(self._places(requests, before), len(self._guesses) - 1)
        return np.minimum(self._guesses.ahead[places], drafts)

    def observe(
        self, rows: np.ndarray, requests: np.ndarray, before: np.ndarray, counts: np.ndarray
    ) -> None:
        """Takes new tokens: compares them with their guesses, whether drafted or not, and offers
        guesses of the following ones.

        Args:
            rows: int64 [n].
            requests: int64 [n], numbers of the continuing requests.
            before: int64 [n], tokens of each that were known.
            counts: int64 [n], number of new tokens.
        """
        guesses, first = self._guesses, self._places(requests, before)
        known = len(guesses)
        mine = np.flatnonzero(first + counts < known)  # without requests of a closed loop
        place, came = first[mine], counts[mine]
        had, has = guesses.offered[place], guesses.offered[place + came]
        right = np.minimum(guesses.ahead[place], came)
        table = self._scheduler.table
        for i in np.flatnonzero(had).tolist():
            rates = self._of[int(rows[mine[i]])]
            for token in range(min(int(right[i]) + 1, int(came[i]))):
                rates.note(SOURCE, 0, bool(token < right[i]))
        table.offered[rows] = 0
        for i in np.flatnonzero(has).tolist():
            row = int(rows[mine[i]])
            self._scheduler.offer(row, MOST + 1, self._of[row].estimate(SOURCE))

    def end(self, row: int) -> None:
        """Removes a request that has ended."""
        del self._of[row]

    def _places(self, requests: np.ndarray, before: np.ndarray) -> np.ndarray:
        return np.asarray(self._outputs.offsets[requests] + before)
