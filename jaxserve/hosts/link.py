"""One end of the connection between the leader and a follower: ordered messages, and heartbeats in
both directions that distinguish a dead host from a silent one."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable

from jaxserve.hosts.channel import Channel, Closed
from jaxserve.hosts.messages import BadMessage, Message

BEAT_S = 1.0
PATIENCE_S = 7.0
"""Seconds after which a host that is silent or makes no progress counts as gone."""
START_S = 60.0
"""PATIENCE_S while hosts start: nothing is served yet, and compiling slows heartbeats down."""

BEAT, FAILED, CLOSE = "beat", "failed", "close"


class Link:
    """One end of a connection between two hosts. Its threads begin with `start`.

    The other side is lost if it has gone, has fallen silent or reports that it has failed; `close`
    on either side ends the link without a loss.

    Args:
        channel: what it sends and receives on.
        peer: name of the other side, for errors.
        on_loss: called once with the reason if the other side is lost, on a thread of the link or
            on one that sends.
        patience_s: see PATIENCE_S; in force from `hurry` on. It is counted in this side's own
            heartbeats, so that a pause of this process is not blamed on the other side.

    Attributes:
        peer: name of the other side.
    """

    def __init__(
        self,
        channel: Channel,
        peer: str,
        on_loss: Callable[[str], None],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.peer = peer
        self._channel, self._on_loss = channel, on_loss
        self._patience, self._hurried = START_S, patience_s
        self._each = min(BEAT_S, patience_s / 4)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = threading.Event()  # closed, or lost
        self._now = self._heard = 0.0
        self._sent = self._received = 0
        self._done = self._done_there = 0  # of the received ones, on both sides
        self._marks: deque[tuple[float, int]] = deque()
        self._threads = [
            threading.Thread(target=run, name=f"jaxserve-{name}", daemon=True)
            for run, name in ((self._listen, "listens"), (self._beat, "beats"))
        ]

    def start(self) -> None:
        """Starts to listen and to send heartbeats."""
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """Both sides serve now: patience_s replaces START_S."""
        self._patience = self._hurried

    def send(self, message: Message) -> None:
        """Sends a message. Raises nothing if the other side is lost; `on_loss` is called
        instead."""
        if self._over.is_set():
            return
        self._sent += 1
        try:
            self._channel.send(message)
        except Closed:
            self._lose(f"{self.peer} is gone")

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message, in order. Raises queue.Empty after timeout_s. Waits forever if the
        other side is lost, which only `on_loss` reports."""
        message = self._inbox.get(timeout=timeout_s)
        self._received += 1
        return message

    def done(self) -> None:
        """Marks the messages received so far as done; the next heartbeat tells the other side."""
        self._done = self._received

    def mark(self) -> None:
        """Marks the messages sent so far as done on this side. The other side counts as lost if it
        has not done them within patience_s from now."""
        self._marks.append((self._now, self._sent))

    def close(self, last: Message) -> None:
        """Ends the link with a last message. Idempotent."""
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        with contextlib.suppress(Closed):
            self._channel.send(last)

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                self._heard = self._now
                if message.name == BEAT:
                    self._done_there = int(message.fields["done"])
                    continue
                if message.name == FAILED:
                    self._lose(f"{self.peer}: {message.fields['why']}")
                    return
                if message.name == CLOSE:
                    self._over.set()
                self._inbox.put(message)
        except Closed:
            self._lose(f"{self.peer} is gone")
        except (BadMessage, KeyError, TypeError, ValueError, OverflowError) as error:
            self._lose(f"{self.peer} sent an invalid message: {error}")

    def _beat(self) -> None:
        while not self._over.wait(self._each):
            self._now += self._each
            self._check()
            try:
                self._channel.send(Message(BEAT, {"done": self._done}))
            except Closed:
                self._lose(f"{self.peer} is gone")

    def _check(self) -> None:
        if self._now - self._heard > self._patience:
            self._lose(f"{self.peer} has said nothing for {self._patience:g} s")
        while self._marks and self._marks[0][1] <= self._done_there:
            self._marks.popleft()
        if self._marks and self._now - self._marks[0][0] > self._patience:
            self._lose(f"{self.peer} is {self._patience:g} s behind")

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        self._on_loss(why)
