"""Responses kept in memory, with bounds on number, bytes and age, and for each tenant."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jaxserve.server.requests.options import ResponseLimits

OWN_BYTES = 2048
"""Bytes that a response takes beside its JSON, about."""


@dataclass(eq=False)
class StoredResponse:
    """One turn of a conversation.

    Attributes:
        id: its id.
        response: the response, JSON.
        input_items: the items of its input, a list as JSON.
        output_items: the items of its output in the form that later turns read, likewise.
        count: number of items, including those of all previous turns.
        previous: the previous turn.
        request: id of its request in the engine.
        size: bytes of this turn.
        read: bytes of its input and output items, including all previous turns.
        whole: `size`, including all previous turns.
    """

    id: str
    response: bytes
    input_items: bytes
    output_items: bytes
    count: int
    previous: StoredResponse | None = None
    request: str = ""
    size: int = field(init=False)
    read: int = field(init=False)
    whole: int = field(init=False)
    _holders: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        items = len(self.input_items) + len(self.output_items)
        self.size = OWN_BYTES + len(self.response) + items
        self.read, self.whole = items, self.size
        if self.previous is not None:
            self.count += self.previous.count
            self.read += self.previous.read
            self.whole += self.previous.whole

    def turns(self) -> list[StoredResponse]:
        """The turns of the conversation up to this one, from the first."""
        turns: list[StoredResponse] = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]

    def hold(self) -> int:
        """Counts one more user. Returns the bytes of the turns that had no user before, which are
        kept from now on."""
        turn: StoredResponse | None = self
        kept = 0
        while turn is not None:
            turn._holders += 1
            if turn._holders > 1:
                break
            kept += turn.size
            turn = turn.previous
        return kept

    def let_go(self) -> int:
        """The inverse of `hold`. Returns the bytes of the turns that have no user any more."""
        turn: StoredResponse | None = self
        freed = 0
        while turn is not None:
            turn._holders -= 1
            if turn._holders:
                break
            freed += turn.size
            turn = turn.previous
        return freed


@dataclass(eq=False)
class _Shelf:
    """The responses of one tenant. stored: response and time of storing by id, the oldest first."""

    stored: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    bytes: int = 0


class ResponseStore:
    """Responses by tenant and id. A tenant has at most its share; if its next response does not
    fit, its own oldest ones are dropped. If all tenants together have too much, the oldest of the
    tenant with the most are dropped, even if that tenant has just stored one: a tenant with less
    than an equal share loses none. A dropped turn can still be read by later turns of its
    conversation, and counts until the last of them is dropped, too.

    Used on the event loop's thread.

    Args:
        limits: bounds on what is kept.
        clock: seconds.
    """

    def __init__(self, limits: ResponseLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.stored) for shelf in self._shelves.values())

    @property
    def bytes(self) -> int:
        """Bytes of all responses."""
        return sum(shelf.bytes for shelf in self._shelves.values())

    def put(self, tenant: str, turn: StoredResponse) -> bool:
        """Stores a response. False if it is larger than the tenant's share."""
        self._expire()
        if turn.whole > self._room(tenant):
            return False
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.stored[turn.id] = self._clock(), turn
        shelf.bytes += turn.hold()
        while len(shelf.stored) > self._most(tenant) or shelf.bytes > self._room(tenant):
            self._drop(tenant, next(iter(shelf.stored)))
        while len(self) > self._limits.count or self.bytes > self._limits.bytes:
            most = max(
                self._shelves,
                key=lambda tenant_name: (self._part(tenant_name), tenant_name == tenant),
            )
            self._drop(most, next(iter(self._shelves[most].stored)))
        return turn.id in shelf.stored

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The tenant's response with this id; None if there is none."""
        self._expire()
        shelf = self._shelves.get(tenant)
        kept = None if shelf is None else shelf.stored.get(response_id)
        return None if kept is None else kept[1]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes the response with this id; False if the tenant has none."""
        if self.get(tenant, response_id) is None:
            return False
        self._drop(tenant, response_id)
        return True

    def _most(self, tenant: str) -> int:
        return max(1, int(self._limits.count * self._share(tenant)))

    def _room(self, tenant: str) -> int:
        return int(self._limits.bytes * self._share(tenant))

    def _share(self, tenant: str) -> float:
        """Without keys there is one tenant, which may have everything."""
        return self._limits.key_share if tenant else 1.0

    def _part(self, tenant: str) -> float:
        """The tenant's share of everything that is kept."""
        shelf = self._shelves[tenant]
        return max(len(shelf.stored) / self._limits.count, shelf.bytes / self._limits.bytes)

    def _drop(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        _, turn = shelf.stored.pop(response_id)
        shelf.bytes -= turn.let_go()
        if not shelf.stored:
            del self._shelves[tenant]

    def _expire(self) -> None:
        oldest = self._clock() - self._limits.keep_s
        for tenant, response_id in list(self._old(oldest)):
            self._drop(tenant, response_id)

    def _old(self, oldest: float) -> Iterator[tuple[str, str]]:
        for tenant, shelf in self._shelves.items():
            for response_id, (when, _) in shelf.stored.items():
                if when > oldest:
                    break
                yield tenant, response_id
