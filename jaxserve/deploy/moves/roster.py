"""Which replicas run, as routers hear it from Ray Serve, for those whose answers come from one that
is to go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.deploy.replicas import Replicas

Listener = Callable[[Sequence[str], bool], None]
"""Takes the names of replicas with new snapshots, and whether others run than before."""
_MOST_GONE = 1000  # replicas that are remembered once they are gone


class Roster:
    """The running replicas of one deployment, without those that are being removed. Any thread may
    call it.

    Attributes:
        replicas: What this process' router knows of them; None before it knows anything.
    """

    def __init__(self) -> None:
        self.replicas: Replicas | None = None
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._seen: dict[str, None] = {}
        self._listeners: list[Listener] = []

    def update(self, running: Mapping[str, str], heard: Sequence[str] = ()) -> None:
        """Notes which replicas run.

        Args:
            running: the system fingerprint of each by name, "" if it has not said.
            heard: names of those whose snapshots are new.
        """
        with self._lock:
            known = {name: said or self._running.get(name, "") for name, said in running.items()}
            changed, self._running = known != self._running, known
            self._seen = {**dict.fromkeys(self._seen), **dict.fromkeys(known)}
            for name in [name for name in self._seen if name not in known][:-_MOST_GONE]:
                del self._seen[name]
            listeners = list(self._listeners) if changed or heard else []
        for listener in listeners:
            listener(heard, changed)

    def listen(self, listener: Listener) -> None:
        """Calls the listener after each update with anything new, on the thread that made it."""
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
