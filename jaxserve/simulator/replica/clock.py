"""The two clocks of a simulated replica: its host's thread, and its device."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.sched.cost.host_overhead import HostOverhead


@dataclass
class Clock:
    """The time of a replica's host thread, and when its device is free, in seconds.

    Attributes:
        host: Times of the host's thread.
        pace: Factor on these times.
        now: The host thread's time.
        device_free: When the device has finished all work launched so far.
    """

    host: HostOverhead
    pace: float = field(default=1.0, kw_only=True)
    now: float = 0.0
    device_free: float = 0.0

    def wake(self, arrival: float) -> float:
        """A request arrives at an idle replica and wakes the host. Returns when the host
        continues."""
        self.now = max(self.now, arrival + self.host.wake)
        return self.now

    def receive(self, requests: int) -> None:
        """The host receives this many new requests before it plans a step."""
        self.now += (self.host.receive + self.host.receive_row * requests) * self.pace

    def plan(self, live: int) -> None:
        """The host plans a step with `live` requests in the scheduler."""
        self.now += (self.host.plan + self.host.plan_row * live) * self.pace

    def launch(
        self, rows: int, admitted: int, moves: int, seconds: float, *, idle: bool
    ) -> tuple[float, float]:
        """The host launches a batch.

        Args:
            rows: Rows of the batch.
            admitted: Rows that take a slot for sampling.
            moves: Number of its operations on the pool.
            seconds: Time on the device.
            idle: Whether nothing is in flight.

        Returns:
            When the batch starts and ends on the device.
        """
        host = self.host
        took = host.launch + host.launch_row * rows + host.admit * admitted + host.move * moves
        self.now += took * self.pace
        start = max(self.now, self.device_free)
        if idle:
            start += host.idle
        self.device_free = start + seconds
        return start, self.device_free

    def move(self, moves: int, seconds: float) -> None:
        """The host launches operations on the pool without a batch."""
        self.now += self.host.move * moves * self.pace
        self.device_free = max(self.now, self.device_free) + seconds

    def land(self, end: float) -> float:
        """The host waits for a step that ends at `end`. Returns when it has the tokens."""
        self.now = max(self.now, end)
        return self.now

    def finish(self, rows: int) -> None:
        """The host processes the tokens of this many rows."""
        self.now += (self.host.finish + self.host.finish_row * rows) * self.pace
