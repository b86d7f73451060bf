"""The clients of `bench soak`, each on its own thread, and a check that none waits for ever.

The policy decides how long a call waits while others keep coming, and some policies promise
nothing, so clients have no time limit. But once no more calls are made, little is left to generate:
if the server generates no token for PATIENCE_S while clients wait, they wait for ever.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

from jaxserve.client import ServerError
from jaxserve_lab.bench.stress.ledger import Ledger
from jaxserve_lab.bench.stress.server_process import Victim
from jaxserve_lab.bench.stress.soak_caller import Caller
from jaxserve_lab.bench.stress.soak_calls import KINDS
from jaxserve_lab.bench.stress.soak_frontends import GrpcDoor, HttpDoor, Refused
from jaxserve_lab.bench.stress.soak_metrics import SAMPLE_S, tokens

PATIENCE_S = 120.0


class ServerLost(Exception):
    """There is no server any more; the message says why."""


class Patience:
    """How long clients wait for a server without new calls: until no token has come for limit_s."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._tokens: float | None = None
        self._since: float | None = None

    def over(self, tokens: float | None, now: float) -> bool:
        """Whether patience has run out. tokens: generated so far; None if unknown. now: seconds."""
        if self._since is None or (tokens is not None and tokens != self._tokens):
            self._tokens, self._since = tokens, now
        return now - self._since > self._limit_s


class Clients:
    """Callers on separate threads, which share what the first has learnt from the server.

    Args:
        server: The server.
        ledger: Notes calls.
        seed: Seed of the calls.
        count: Number of callers.
        patience_s: See `Patience`.

    Raises:
        ServerLost: The server does not answer the first caller.
    """

    def __init__(
        self,
        server: Victim,
        ledger: Ledger,
        seed: int,
        count: int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._server, self._ledger, self._patience_s = server, ledger, patience_s
        first = self._caller(random.Random(seed))
        try:
            first.learn()
        except (Refused, ServerError) as error:
            raise ServerLost(f"it serves nobody: {error}") from None
        first.grpc.close()
        self.callers = [self._caller(random.Random(f"{seed}, {i}"), first) for i in range(count)]

    def each_kind(self) -> None:
        """Makes each kind of call at least once, with all clients together. Raises ServerLost."""
        kinds = list(KINDS)
        rounds = range(max(len(kinds), len(self.callers)))

        def call(caller: Caller) -> None:
            for number in rounds[self.callers.index(caller) :: len(self.callers)]:
                self._call(caller, kinds[number % len(kinds)])

        self._at_once(call, time.monotonic())

    def call_for(self, seconds: float) -> float:
        """Makes calls of random kinds for this time, one after the other in each client. Returns
        the seconds from then to the end of the last call. Raises ServerLost."""
        end = time.monotonic() + seconds
        kinds, weights = list(KINDS), list(KINDS.values())

        def call(caller: Caller) -> None:
            while time.monotonic() < end and self._server.process.poll() is None:
                self._call(caller, caller.rng.choices(kinds, weights)[0])

        self._at_once(call, end)
        return max(0.0, time.monotonic() - end)

    def close(self) -> None:
        """Closes all connections."""
        for caller in self.callers:
            caller.grpc.close()

    def _caller(self, rng: random.Random, first: Caller | None = None) -> Caller:
        doors = GrpcDoor(self._server.address), HttpDoor(self._server.http_address)
        if first is None:
            return Caller(rng, *doors, self._ledger)
        return Caller(rng, *doors, self._ledger, first.vocab_size, first.known)

    def _call(self, caller: Caller, kind: Callable[[Caller], None]) -> None:
        caller.doing = kind.__name__
        kind(caller)

    def _at_once(self, work: Callable[[Caller], None], end: float) -> None:
        """Runs each client on its own thread; an unexpected error is a problem. end: when no more
        calls are made, on the monotonic clock."""
        threads = [
            threading.Thread(target=self._guarded, args=(work, caller)) for caller in self.callers
        ]
        for thread in threads:
            thread.start()
        lost, patience = "", Patience(self._patience_s)
        while waiting := [i for i, thread in enumerate(threads) if thread.is_alive()]:
            threads[waiting[0]].join(SAMPLE_S)
            now = time.monotonic()
            if not lost and now > end and patience.over(tokens(self._server), now):
                doing = Counter(self.callers[i].doing for i in waiting)
                counts = ", ".join(f"{count} {kind}" for kind, count in sorted(doing.items()))
                lost = f"clients wait for good ({counts}), no token for {self._patience_s:g} s"
                self._server.process.kill()  # so that their calls end
        code = self._server.process.poll()
        if code is not None:
            lost = lost or f"the server ended by itself, with {code}"
        if lost:
            raise ServerLost(lost)

    def _guarded(self, work: Callable[[Caller], None], caller: Caller) -> None:
        try:
            work(caller)
        except Exception as error:
            self._ledger.problem(f"a client failed: {error!r}")
