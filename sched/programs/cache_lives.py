"""For how long the cache of a program whose tool runs is worth keeping: the time to live of
Continuum (arXiv 2511.02230).

A cache that is kept for t seconds costs those who wait for its memory t seconds. If the tool is
back by then, it saves the seconds to get the cache back, and those for which the next call would
have to wait for memory. The latter count as far as programs that have made more calls are closer to
their ends, since only then does it help to keep them in order. So t is the one of the tool's
earlier times with the most of P(tool takes at most t) x (lost + memory x waited) - t, or 0.

The paper's fallback for unknown tools is an exponential distribution that it does not give in full.
Here, a cache whose tool nobody knows is kept as long as keeping it costs no more than losing it.
"""

from __future__ import annotations

import numpy as np

from jaxserve.sched.programs.program_table import ProgramTable


class CacheLives:
    """The times to live of the caches of these programs; see `retention.Lives`."""

    def __init__(self, programs: ProgramTable) -> None:
        self._programs = programs

    def since(self, program: int) -> float | None:
        """See `Lives`."""
        found = self._programs.tool_wait(program)
        return None if found is None else found.since

    def seconds(self, program: int, lost: float, waited: float) -> float:
        """See `Lives`."""
        found = self._programs.tool_wait(program)
        if found is None:
            return 0.0
        memory = self._programs.call_counts.memory(found.kind)
        times = self._programs.tool_times.times(found.tenant, found.tools)
        return time_to_live(times, lost + memory * waited)

    def is_back(self, program: int, since: float) -> bool:
        """See `Lives`."""
        return self._programs.is_back(program, since)


def time_to_live(times: np.ndarray, saved: float) -> float:
    """Seconds to keep a cache.

    Args:
        times: float64 [n], earlier times of the tool, ascending.
        saved: Seconds that are saved if the tool is back by then.
    """
    if not len(times):
        return max(saved, 0.0)
    gain = np.arange(1, len(times) + 1) / len(times) * saved - times
    best = int(np.argmax(gain))
    return float(times[best]) if gain[best] > 0 else 0.0
