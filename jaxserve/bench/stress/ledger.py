"""How calls ended, as their clients saw it, and whether the server saw the same."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from jaxserve.server.requests.call_outcome import Ending

# What the server may have called a call that its client saw end so. A client that has gone cannot
# know whether the server was done before it noticed.
SEEN_AS: Mapping[str, frozenset[Ending]] = {
    "ok": frozenset({Ending.OK}),
    "left": frozenset({Ending.OK, Ending.CANCELLED, Ending.TIMED_OUT}),
    "unread": frozenset({Ending.OK, Ending.CANCELLED, Ending.SLOW_READER}),
    "half": frozenset({Ending.CANCELLED, Ending.INVALID, Ending.MALFORMED}),
    # gRPC
    "DEADLINE_EXCEEDED": frozenset({Ending.OK, Ending.CANCELLED, Ending.TIMED_OUT}),
    "INVALID_ARGUMENT": frozenset({Ending.INVALID, Ending.MALFORMED}),
    "ALREADY_EXISTS": frozenset({Ending.DUPLICATE}),
    "RESOURCE_EXHAUSTED": frozenset(
        {Ending.QUEUE_FULL, Ending.TOO_MANY_CALLS, Ending.EXPECTED_LATE, Ending.SLOW_READER}
    ),
    "CANCELLED": frozenset({Ending.CANCELLED}),
    "UNAVAILABLE": frozenset({Ending.SHUTTING_DOWN, Ending.ENGINE_FAILED}),
    "INTERNAL": frozenset({Ending.ENGINE_FAILED, Ending.FAILED}),
    # HTTP
    "not_json": frozenset({Ending.MALFORMED}),
    "invalid_value": frozenset({Ending.INVALID}),
    "unknown_field": frozenset({Ending.INVALID}),
    "duplicate": frozenset({Ending.DUPLICATE}),
    "queue_full": frozenset({Ending.QUEUE_FULL}),
    "expected_late": frozenset({Ending.EXPECTED_LATE}),
    "too_many_calls": frozenset({Ending.TOO_MANY_CALLS}),
    "slow_reader": frozenset({Ending.SLOW_READER}),
}


class Ledger:
    """Each call once, from any thread. by_kind: (kind, how it ended) -> calls. longest_s: that
    anybody waited for the next piece of an answer, by whom."""

    def __init__(self) -> None:
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.longest_s: dict[str, float] = {}
        self.problems: Counter[str] = Counter()
        self._seen: Counter[tuple[str, frozenset[Ending]]] = Counter()
        self._maybe: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, kind: str, method: str, ended: str, *, surely: bool = True) -> None:
        """A call of that method has ended. ended: a key of SEEN_AS; any other is a problem. surely:
        the server has heard of it."""
        with self._lock:
            self.by_kind[kind, ended] += 1
            endings = SEEN_AS.get(ended)
            if endings is None:
                self.problems[f"{kind}: a call ended with {ended}"] += 1
                endings = frozenset(Ending)
            if surely:
                self._seen[method, endings] += 1
            else:
                self._maybe[method] += 1

    def waited(self, who: str, seconds: float) -> None:
        """Somebody did, for the next piece of an answer."""
        with self._lock:
            self.longest_s[who] = max(seconds, self.longest_s.get(who, 0.0))

    def problem(self, text: str) -> None:
        """Something that did not hold."""
        with self._lock:
            self.problems[text] += 1

    def calls(self) -> int:
        """So far."""
        return self.by_kind.total()

    def disagreements(self, served: Mapping[tuple[str, str], int]) -> list[str]:
        """Where the server's counts, by (method, ending), are none that these calls can have."""
        found = []
        for method in sorted({method for method, _ in (*self._seen, *served)}):
            ours = {sets: count for (name, sets), count in self._seen.items() if name == method}
            theirs = {Ending(end): n for (name, end), n in served.items() if name == method}
            found += _compared(method, ours, self._maybe[method], theirs)
        return found


def _compared(
    method: str, ours: Mapping[frozenset[Ending], int], maybe: int, theirs: Mapping[Ending, int]
) -> list[str]:
    """Totals agree, and each ending has as many as surely are its own, and at most as many as can
    be; calls that the server may not have heard of can be any, or none."""
    found = []
    total, counted = sum(ours.values()), sum(theirs.values())
    if not total <= counted <= total + maybe:
        more = f" and perhaps {maybe} more" if maybe else ""
        found.append(f"{method}: {counted} calls were counted, {total}{more} were made")
    for ending in Ending:
        least = sum(count for sets, count in ours.items() if sets == {ending})
        most = sum(count for sets, count in ours.items() if ending in sets) + maybe
        if not least <= theirs.get(ending, 0) <= most:
            bounds = str(least) if least == most else f"{least} to {most}"
            found.append(
                f"{method}: {theirs.get(ending, 0)} are {ending} to the server, "
                f"{bounds} to the clients"
            )
    return found
