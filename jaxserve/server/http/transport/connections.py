"""The connections of one port: bounds their number, and chooses which one to drop for the next."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jaxserve.server.requests.admission import Overloaded

_NEWCOMERS = 4  # one place of so many is for newcomers


class Standing(enum.IntEnum):
    """What is known of a connection's client; the lowest is dropped first."""

    STRANGER = 0
    KNOWN = 1  # has sent a valid key, if one is needed, or asked for health
    CALLING = 2  # has an admitted call


class Connections:
    """At most `limit` connections; used on the event loop's thread. To make room for a new one, the
    stranger that was silent longest is dropped, or else the known client that was silent longest;
    never one with a call. A quarter of the places is for strangers, since otherwise known clients
    could keep all others out."""

    def __init__(self, limit: int) -> None:
        self._newcomers = max(1, limit // _NEWCOMERS)
        self.limit = limit
        # In the order of their last message, the longest silent first.
        self._places: dict[Standing, dict[Place, None]] = {standing: {} for standing in Standing}

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def enter(self, drop: Callable[[], object]) -> Place:
        """The place of a new connection. drop: closes the connection at once."""
        place = Place(self, drop)
        self.put(place, Standing.STRANGER)
        if len(self) > self.limit:
            strangers, known = self._places[Standing.STRANGER], self._places[Standing.KNOWN]
            among = strangers if len(strangers) > self._newcomers or not known else known
            first = next(iter(among))
            first.leave()
            first.drop()
        return place

    def check_room(self) -> None:
        """Raises Overloaded if one more call would leave no place for newcomers."""
        calling = len(self._places[Standing.CALLING])
        if calling >= self.limit - self._newcomers:
            problem = f"{calling} connections have calls, as many as open files allow (ulimit -n)"
            raise Overloaded(f"{problem}; try again later")

    def put(self, place: Place, standing: Standing) -> None:
        """Sets the standing of a place that has just sent something."""
        self._places[place.standing].pop(place, None)
        place.standing = standing
        self._places[standing][place] = None

    def remove(self, place: Place) -> None:
        """Removes a place."""
        self._places[place.standing].pop(place, None)


class Place:
    """The place of one connection. drop: closes the connection at once; replaced after the TLS
    handshake. Without `connections` the place is not counted."""

    def __init__(
        self, connections: Connections | None = None, drop: Callable[[], object] = lambda: None
    ) -> None:
        self._connections, self.drop = connections, drop
        self.standing = Standing.STRANGER

    def heard(self) -> None:
        """The client has sent something."""
        self._be(self.standing)

    def known(self) -> None:
        """The client may call, or has asked for health."""
        self._be(max(self.standing, Standing.KNOWN))

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The context of a call. Raises Overloaded."""
        if self._connections is not None:
            self._connections.check_room()
        self._be(Standing.CALLING)
        try:
            yield
        finally:
            self._be(Standing.KNOWN)

    def leave(self) -> None:
        """The connection is closed."""
        if self._connections is not None:
            self._connections.remove(self)
        self._connections = None

    def _be(self, standing: Standing) -> None:
        if self._connections is not None:
            self._connections.put(self, standing)
