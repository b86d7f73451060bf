"""The two clocks of a simulated replica: its host's thread, and its device."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.sched.cost.host_overhead import HostOverhead


@dataclass
class Clock:
    """now: of the host's thread, seconds. device_free: when the device has done all it was told.
    pace: times as long as `host` says that the host takes."""

    host: HostOverhead
    pace: float = field(default=1.0, kw_only=True)
    now: float = 0.0
    device_free: float = 0.0

    def wake(self, arrival: float) -> float:
        """A request arrives where there is none, and the host goes on: when."""
        self.now = max(self.now, arrival + self.host.wake)
        return self.now

    def receive(self, requests: int) -> None:
        """The host takes in so many requests, before it plans a step."""
        self.now += (self.host.receive + self.host.receive_row * requests) * self.pace

    def plan(self, live: int) -> None:
        """The host plans a step, with so many requests there."""
        self.now += (self.host.plan + self.host.plan_row * live) * self.pace

    def launch(
        self, rows: int, admitted: int, moves: int, seconds: float, *, idle: bool
    ) -> tuple[float, float]:
        """The host launches a batch that takes the device so long: when it starts and ends there.
        admitted: rows that take a slot for sampling; moves: operations on the pool; idle: nothing
        is in flight."""
        host = self.host
        took = host.launch + host.launch_row * rows + host.admit * admitted + host.move * moves
        self.now += took * self.pace
        start = max(self.now, self.device_free)
        if idle:
            start += host.idle
        self.device_free = start + seconds
        return start, self.device_free

    def move(self, moves: int, seconds: float) -> None:
        """The host launches operations without a batch."""
        self.now += self.host.move * moves * self.pace
        self.device_free = max(self.now, self.device_free) + seconds

    def land(self, end: float) -> float:
        """The host waits for a step that ends then, and has its tokens: when."""
        self.now = max(self.now, end)
        return self.now

    def finish(self, rows: int) -> None:
        """The host takes in the tokens of so many rows."""
        self.now += (self.host.finish + self.host.finish_row * rows) * self.pace
