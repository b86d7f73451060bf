"""The leader's side of a group of hosts: its followers, and the messages to them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxserve.hosts.callers import Callers
from jaxserve.hosts.channel import Channel, Closed
from jaxserve.hosts.link import CLOSE, FAILED, Link
from jaxserve.hosts.messages import BadMessage, Message
from jaxserve.hosts.process_exit import end_process
from jaxserve.hosts.rank import GroupError, Rank

log = logging.getLogger(__name__)

HELLO, WELCOME, HERE, ALL_HERE = "hello", "welcome", "here", "all here"
_HELLO_S = 5.0  # for a new connection to identify itself
HELLO_BYTES = 1 << 16  # most bytes of a message before both sides know each other
_LOGGED = 80  # most logged characters of a stranger's value
OTHER = "its versions or configuration are not the leader's, whose log says where they differ"
"""Reason for a refused host. Anybody who reaches the port gets it, so it contains no values."""
_LOOK_S = 0.5  # interval of checks whether followers can still come
LAST_S = 5.0
"""Seconds until the process ends after a host is lost or the leader has failed, whatever else it is
doing."""


class Group:
    """The followers, once all have joined. If one is lost, the whole group is: `on_loss` is called,
    and LAST_S later the process ends with exit code 1, since it may be waiting for a device of the
    lost host forever. Without an `on_loss` it ends at once. `broadcast` and `mark` are for one
    thread.

    Args:
        channels: from `gather`, by host index.
        coordinator: address at which JAX coordinates, "host:port".
    """

    def __init__(self, channels: Mapping[int, Channel], coordinator: str) -> None:
        self._lost = threading.Event()
        self._lock = threading.Lock()
        self._why = ""
        self._on_loss: Callable[[str], None] | None = None
        self._links = [
            Link(channel, f"host {index}", self._lose) for index, channel in channels.items()
        ]
        for channel, link in zip(channels.values(), self._links, strict=True):
            with contextlib.suppress(Closed):  # the link will report it
                channel.send(Message(WELCOME, {"coordinator": coordinator}))
            link.start()

    def broadcast(self, message: Message) -> None:
        """Sends a message to every follower, in the order of the calls."""
        for link in self._links:
            link.send(message)

    def answers(self) -> list[Message]:
        """The next message of each follower, in the order of their indices. Blocks."""
        return [link.receive() for link in self._links]

    def barrier(self) -> None:
        """Waits until every follower has reached this point, then releases them. The devices'
        collectives have little patience with late hosts."""
        self.answers()
        self.broadcast(Message(ALL_HERE))

    def hurry(self) -> None:
        """All hosts serve now, see `Link.hurry`."""
        for link in self._links:
            link.hurry()

    def mark(self) -> None:
        """Marks the messages sent so far as done by the leader; see `Link.mark`."""
        for link in self._links:
            link.mark()

    def lost(self, timeout_s: float) -> str | None:
        """Why the group is lost, if it is within that many seconds."""
        return self._why if self._lost.wait(timeout_s) else None

    def on_loss(self, tell: Callable[[str], None]) -> None:
        """Calls tell(why) once, from any thread, when a follower is lost."""
        with self._lock:
            self._on_loss = tell
            lost = self._lost.is_set()
        if lost:
            tell(self._why)

    def close(self, why: str | None = None) -> None:
        """Tells the followers to end: as a failure if a reason is given. Idempotent."""
        last = Message(CLOSE) if why is None else Message(FAILED, {"why": why})
        for link in self._links:
            link.close(last)

    def fail(self, why: str) -> None:
        """The leader has failed: ends the followers, which may be waiting for it forever, and the
        process, as if a follower were lost."""
        _end_soon()
        self.close(why)

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost.is_set():
                return
            self._why, tell = why, self._on_loss
            if tell is not None:
                _end_soon()  # first, since logging may block
            self._lost.set()
        log.error("the group of hosts is lost: %s", why)
        if tell is None:
            self.close(why)
            end_process(1)
        tell(why)
        self.close(why)


def _end_soon() -> None:
    timer = threading.Timer(LAST_S, end_process, (1,))
    timer.daemon = True
    timer.start()


class Starter(Protocol):
    """Starts the followers, if the leader has to."""

    def start(self, coordinator: str) -> None:
        """Starts the followers; the leader listens at this address, "host:port"."""

    def problem(self) -> str | None:
        """Why a follower will not come, in one line; None while all may still come."""


def gather(
    rank: Rank, profile: Mapping[str, Any], starter: Starter | None = None
) -> dict[int, Channel]:
    """Waits for all followers, by index. A host whose `profile` differs is refused, and the log
    says why. starter: None if somebody else starts them. Raises GroupError."""
    try:
        listener = socket.create_server((rank.address, rank.port), family=rank.family)
    except OSError as error:
        where = f"cannot listen on {rank.coordinator}"
        raise GroupError(f"mesh.coordinator: {where} ({error.strerror or error})") from error
    with listener:
        rank = dataclasses.replace(rank, port=listener.getsockname()[1])
        callers = Callers(
            listener, lambda channel, address: _admitted(channel, address, rank, profile)
        )
        try:
            found = _all_of(callers, rank, starter)
        except BaseException as error:
            why = str(error) or type(error).__name__
            callers.close(lambda channel: _refuse(channel, why))
            raise
        callers.close(Channel.close)
        return found


def _all_of(callers: Callers, rank: Rank, starter: Starter | None) -> dict[int, Channel]:
    found: dict[int, Channel] = {}
    if starter is not None:
        starter.start(rank.coordinator)
    deadline = time.monotonic() + rank.wait_s
    while len(found) < rank.hosts - 1:
        left = deadline - time.monotonic()
        problem = None if starter is None else starter.problem()
        if problem is None and left <= 0:
            problem = (
                f"mesh.hosts: {len(found)} of {rank.hosts - 1} followers have come to "
                f"{rank.coordinator} within {rank.wait_s:g} s"
            )
        if problem is not None:
            for channel in found.values():
                _refuse(channel, problem)
            raise GroupError(problem)
        came = callers.next(min(left, _LOOK_S))
        if came is None:
            continue
        index, channel = came
        if index in found:
            _refuse(found[index], f"mesh.host_index: another host has come as {index}")
        found[index] = channel
    return dict(sorted(found.items()))


def _admitted(channel: Channel, address: str, rank: Rank, profile: Mapping[str, Any]) -> int | None:
    """The index of a new connection; None, after telling it why, if it does not belong here."""
    try:
        message = channel.receive(_HELLO_S, HELLO_BYTES)
        index, theirs = message.fields.get("index"), message.fields.get("profile")
        if message.name != HELLO or type(index) is not int or not isinstance(theirs, dict):
            raise BadMessage(f"a {message.name[:40]!r} instead of a hello")
    except (Closed, BadMessage, TimeoutError) as error:
        why = str(error)[:_LOGGED]
        log.warning("a connection from %s is not a follower: %s", address, why)
        channel.close()
        return None
    difference = _difference(theirs, profile)
    if difference is None and not 0 < index < rank.hosts:
        difference = f"mesh.host_index must be 1 to {rank.hosts - 1}, got {_short(index)}"
    if difference is None:
        return index
    log.warning("the host at %s is refused: %s", address, difference)
    _refuse(channel, OTHER)
    return None


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str | None:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            theirs_is, ours_is = _short(theirs.get(name)), _short(ours.get(name))
            return f"{name[:_LOGGED]}: it has {theirs_is}, the leader {ours_is}"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LOGGED else f"{text[:_LOGGED]}... ({len(text)} characters)"


def _refuse(channel: Channel, why: str) -> None:
    with contextlib.suppress(Closed):
        channel.send(Message(FAILED, {"why": why}))
    channel.close()
