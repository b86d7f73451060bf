"""One end of a connection between the leader and a follower, once both are in the group: messages
in order, and beats both ways that tell a host that is silent from one that has nothing to say."""

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
"""Seconds after which a host that says nothing, or does not get on, counts as gone."""
START_S = 60.0
"""The same while hosts start: nobody is served yet, and compiling leaves little to others."""

BEAT, FAILED, CLOSE = "beat", "failed", "close"


class Link:
    """peer: what the other side is called. on_loss(why) is called once, on a thread of the link's
    or one that sends, when the other side has gone, has fallen silent or says that it has failed; a
    `close` of either side ends the link instead. Threads begin with `start`.

    patience_s: see PATIENCE_S; it holds from `hurry` on. It is counted in beats of our own, so that
    a time in which we ourselves were held up is not held against others.
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
        self._done = self._done_there = 0  # of what was received, here and on the other side
        self._marks: deque[tuple[float, int]] = deque()
        self._threads = [
            threading.Thread(target=run, name=f"jaxserve-{name}", daemon=True)
            for run, name in ((self._listen, "listens"), (self._beat, "beats"))
        ]

    def start(self) -> None:
        """Begins to listen, and to beat."""
        for thread in self._threads:
            thread.start()

    def hurry(self) -> None:
        """Both sides serve: from now on patience is short."""
        self._patience = self._hurried

    def send(self, message: Message) -> None:
        """To the other side; where it has gone, `on_loss` hears of it, and nothing is raised."""
        if self._over.is_set():
            return
        self._sent += 1
        try:
            self._channel.send(message)
        except Closed:
            self._lose(f"{self.peer} is gone")

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message, in order. Raises queue.Empty after timeout_s; waits for ever where the
        other side is lost, of which `on_loss` hears."""
        message = self._inbox.get(timeout=timeout_s)
        self._received += 1
        return message

    def done(self) -> None:
        """What was received so far has been done: the other side hears of it with the next beat."""
        self._done = self._received

    def mark(self) -> None:
        """What was sent so far has been done on this side: from now on the other one may take
        patience_s to say the same, or counts as lost."""
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
            self._lose(f"{self.peer} says what nobody understands: {error}")

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
