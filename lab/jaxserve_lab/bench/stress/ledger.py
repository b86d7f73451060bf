"""How calls ended, as their clients saw it, and whether the server saw the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from jaxserve.server.requests.call_outcome import CallOutcome

# What the server may have called a call that its client saw end so. A client that has gone cannot
# know whether the server was done before it noticed.
SEEN_AS: Mapping[str, frozenset[CallOutcome]] = {
    seen: frozenset(map(CallOutcome, outcomes.split()))
    for seen, outcomes in {
        "ok": "ok",
        "left": "ok cancelled timed_out",
        "unread": "ok cancelled slow_reader",
        "half": "cancelled invalid malformed",
        # gRPC
        "DEADLINE_EXCEEDED": "ok cancelled timed_out",
        "INVALID_ARGUMENT": "invalid malformed",
        "ALREADY_EXISTS": "duplicate",
        "RESOURCE_EXHAUSTED": "queue_full too_many_calls expected_late slow_reader",
        "CANCELLED": "cancelled",
        "UNAVAILABLE": "shutting_down engine_failed",
        "INTERNAL": "engine_failed failed",
        # HTTP
        "not_json": "malformed",
        "invalid_value": "invalid",
        "context_length_exceeded": "invalid",
        "unknown_field": "invalid",
        "duplicate": "duplicate",
        "queue_full": "queue_full",
        "expected_late": "expected_late",
        "too_many_calls": "too_many_calls",
        "slow_reader": "slow_reader",
    }.items()
}


class Ledger:
    """Counts each call once. Thread-safe.

    Attributes:
        by_kind: Number of calls, by (kind, how it ended).
        longest_s: The longest wait for the next piece of an answer, by waiter.
        problems: Requirements that did not hold, and how often.
    """

    def __init__(self) -> None:
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.longest_s: dict[str, float] = {}
        self.problems: Counter[str] = Counter()
        self._seen: Counter[tuple[str, frozenset[CallOutcome]]] = Counter()
        self._maybe: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, method: str, ended: str, *, surely: bool = True) -> None:
        """Counts a call that has ended.

        Args:
            kind: Kind of the call.
            method: Its name in the server's metrics.
            ended: A key of SEEN_AS; any other is a problem.
            surely: Whether the server must know of it.
        """
        with self._lock:
            self.by_kind[kind, ended] += 1
            endings = SEEN_AS.get(ended)
            if endings is None:
                self.problems[f"{kind}: a call ended with {ended}"] += 1
                endings = frozenset(CallOutcome)
            if surely:
                self._seen[method, endings] += 1
            else:
                self._maybe[method] += 1

    def waited(self, who: str, seconds: float) -> None:
        """Notes a wait for the next piece of an answer."""
        with self._lock:
            self.longest_s[who] = max(seconds, self.longest_s.get(who, 0.0))

    def problem(self, text: str) -> None:
        """Notes a problem."""
        with self._lock:
            self.problems[text] += 1

    def calls(self) -> int:
        """Number of calls so far."""
        return self.by_kind.total()

    def disagreements(self, served: Mapping[tuple[str, str], int]) -> list[str]:
        """Where the server's counts, by (method, ending), are impossible for these calls; one line
        each."""
        problems = []
        for method in sorted({method for method, _ in (*self._seen, *served)}):
            ours = {sets: count for (name, sets), count in self._seen.items() if name == method}
            theirs = {CallOutcome(end): n for (name, end), n in served.items() if name == method}
            problems += _compared(method, ours, self._maybe[method], theirs)
        return problems


def _compared(
    method: str,
    ours: Mapping[frozenset[CallOutcome], int],
    maybe: int,
    theirs: Mapping[CallOutcome, int],
) -> list[str]:
    """Checks that totals agree, and that the count of each ending is possible: at least its certain
    calls, at most all possible ones. Calls of which the server may not know can have any ending,
    or none."""
    problems = []
    total, counted = sum(ours.values()), sum(theirs.values())
    if not total <= counted <= total + maybe:
        more = f" and perhaps {maybe} more" if maybe else ""
        problems.append(f"{method}: {counted} calls were counted, {total}{more} were made")
    for ending in CallOutcome:
        least = sum(count for sets, count in ours.items() if sets == {ending})
        most = sum(count for sets, count in ours.items() if ending in sets) + maybe
        if not least <= theirs.get(ending, 0) <= most:
            bounds = str(least) if least == most else f"{least} to {most}"
            problems.append(
                f"{method}: {theirs.get(ending, 0)} are {ending} to the server, "
                f"{bounds} to the clients"
            )
    return problems
