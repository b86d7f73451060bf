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
    """Counts each call once. Any thread may use it.

    Attributes:
        by_kind: number of calls, by (kind, how it ended).
        longest_s: the longest wait for the next piece of an answer, by who waited.
        problems: what did not hold, with how often.
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
            kind: of call.
            method: as the server's metrics call it.
            ended: a key of SEEN_AS; any other is a problem.
            surely: whether the server must have heard of it.
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
        """Notes something that did not hold."""
        with self._lock:
            self.problems[text] += 1

    def calls(self) -> int:
        """Number of calls so far."""
        return self.by_kind.total()

    def disagreements(self, served: Mapping[tuple[str, str], int]) -> list[str]:
        """Where the server's counts, by (method, ending), are none that these calls can have; one
        line each."""
        found = []
        for method in sorted({method for method, _ in (*self._seen, *served)}):
            ours = {sets: count for (name, sets), count in self._seen.items() if name == method}
            theirs = {CallOutcome(end): n for (name, end), n in served.items() if name == method}
            found += _compared(method, ours, self._maybe[method], theirs)
        return found


def _compared(
    method: str,
    ours: Mapping[frozenset[CallOutcome], int],
    maybe: int,
    theirs: Mapping[CallOutcome, int],
) -> list[str]:
    """Totals agree, and each ending has as many as surely are its own, and at most as many as can
    be; calls that the server may not have heard of can be any, or none."""
    found = []
    total, counted = sum(ours.values()), sum(theirs.values())
    if not total <= counted <= total + maybe:
        more = f" and perhaps {maybe} more" if maybe else ""
        found.append(f"{method}: {counted} calls were counted, {total}{more} were made")
    for ending in CallOutcome:
        least = sum(count for sets, count in ours.items() if sets == {ending})
        most = sum(count for sets, count in ours.items() if ending in sets) + maybe
        if not least <= theirs.get(ending, 0) <= most:
            bounds = str(least) if least == most else f"{least} to {most}"
            found.append(
                f"{method}: {theirs.get(ending, 0)} are {ending} to the server, "
                f"{bounds} to the clients"
            )
    return found
