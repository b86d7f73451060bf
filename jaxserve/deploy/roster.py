"""Which replicas run, as routers hear it from Ray Serve, for those whose answers come from one that
is to go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class Roster:
    """The running replicas of one deployment, without those that are being removed. Any thread may
    call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._seen: set[str] = set()
        self._listeners: list[Callable[[], None]] = []

    def update(self, running: Mapping[str, str]) -> None:
        """Notes which replicas run. running: the system fingerprint of each by name, "" if it has
        not said."""
        with self._lock:
            known = {name: said or self._running.get(name, "") for name, said in running.items()}
            changed, self._running = known != self._running, known
            self._seen |= known.keys()
            listeners = list(self._listeners) if changed else []
        for listener in listeners:
            listener()

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls the listener after each change, on the thread that made it."""
        with self._lock:
            self._listeners.append(listener)

    def leaves(self, name: str, fingerprint: str) -> bool:
        """Whether a replica is to go, and another one can go on with answers of this system
        fingerprint."""
        with self._lock:
            there = any(said == fingerprint for said in self._running.values())
            return name in self._seen and name not in self._running and there


ROSTER = Roster()
"""That of this process, which has handles of one deployment only."""
