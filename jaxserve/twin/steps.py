"""The steps of a server that is seen only from outside: when they ended, and what was in them.

A step of continuous batching gives a token to each request that decodes, so tokens that come
together are of one step. A prompt's first token comes with the step that ends it. A server with
chunked prefill fills each step up to so many tokens, and begins with who came first: so what is
left of a step beside its decodes was of the prompts that ended then or next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures

APART = 0.3
"""Two tokens are of different steps from this share of the usual time between tokens on."""


@dataclass(frozen=True)
class SeenRequest:
    """A request as its client saw it. Times in seconds on one clock.

    Attributes:
        arrival: When it was sent.
        prompt: Tokens of its prompt that were computed.
        times: float64 [n], when its tokens came.
        limit: Most tokens that it asked for.
    """

    arrival: float
    prompt: int
    times: np.ndarray
    limit: int


@dataclass
class SeenStep:
    """A step.

    Attributes:
        start, end: Seconds.
        after_idle: Whether nobody was served before.
        decodes: Requests that decode, and their cached tokens.
        chunks: Requests whose prompts are computed, how many tokens of each, and how many before.
        received: Requests that get a token.
    """

    start: float
    end: float
    after_idle: bool
    decodes: list[tuple[int, int]] = field(default_factory=list)
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that it computes."""
        return len(self.decodes) + sum(count for _, count, _ in self.chunks)

    def features(self) -> BatchFeatures:
        """What it costs."""
        counts = np.array([1] * len(self.decodes) + [count for _, count, _ in self.chunks])
        before = [cached for _, cached in self.decodes] + [done for _, _, done in self.chunks]
        decoding = np.arange(len(counts)) < len(self.decodes)
        return BatchFeatures.from_rows(counts, np.array(before, np.int64), decoding)


def usual_gap(requests: Sequence[SeenRequest]) -> float:
    """The median time between two tokens of a request, seconds; 0 if none has two."""
    gaps = np.concatenate([np.zeros(0), *(np.diff(one.times) for one in requests)])
    return float(np.median(gaps)) if len(gaps) else 0.0


def seen_steps(
    requests: Sequence[SeenRequest], chunk: int, *, overlap: bool = False
) -> list[SeenStep]:
    """The steps in which these requests were served.

    Args:
        requests: All that were served in that time, in order of arrival.
        chunk: Most tokens of a step.
        overlap: Whether a step is planned while the one before runs, so that who comes meanwhile
            has to wait for the one after it.
    """
    steps = _by_tokens(requests)
    _begin(steps, requests)
    _compute_prompts(steps, requests, chunk, overlap)
    return [part for step in steps for part in _parts(step, chunk)]


def _by_tokens(requests: Sequence[SeenRequest]) -> list[SeenStep]:
    """Steps by what they emit: the ends, who decodes, and who has its first token (`received` but
    not in `decodes`)."""
    apart = APART * usual_gap(requests)
    came = sorted(
        (time, number, place)
        for number, one in enumerate(requests)
        for place, time in enumerate(one.times.tolist())
    )
    steps = list[SeenStep]()
    there, latest = set[int](), -np.inf
    for time, number, place in came:
        if not steps or time - latest > apart or number in there:
            steps.append(SeenStep(0.0, time, after_idle=False))
            there.clear()
        latest = time
        there.add(number)
        steps[-1].received.append(number)
        if place:
            steps[-1].decodes.append((number, requests[number].prompt + place - 1))
    return steps


def _begin(steps: Sequence[SeenStep], requests: Sequence[SeenRequest]) -> None:
    """Sets when each begins: when the one before ends, or when somebody comes if nobody is
    there."""
    arrivals = np.array([one.arrival for one in requests])
    ends = np.sort([one.times[-1] for one in requests if len(one.times)])
    arrivals = np.sort(arrivals[[len(one.times) > 0 for one in requests]])
    before = -np.inf
    for step in steps:
        came = int(arrivals.searchsorted(before, side="right"))
        gone = int(ends.searchsorted(before, side="right"))
        busy = came > gone or came == len(arrivals)  # what comes late of one that has ended
        step.start = before if busy else min(float(arrivals[came]), step.end)
        step.after_idle = not busy
        before = step.end


def _compute_prompts(
    steps: Sequence[SeenStep], requests: Sequence[SeenRequest], chunk: int, overlap: bool
) -> None:
    """Puts the prompts into the steps' room: each from when it came on, behind those before it. One
    that would then end earlier than it did has waited for something else, so it ends as late as it
    can. Of one that does not fit, the rest is of its last step."""
    room = [max(chunk - len(step.decodes), 0) for step in steps]
    starts = np.array([step.start for step in steps])
    for place, step in enumerate(steps):
        decoding = {number for number, _ in step.decodes}
        for number in (one for one in step.received if one not in decoding):
            one = requests[number]
            first = int(starts.searchsorted(one.arrival))
            if overlap and first < place and not steps[first].after_idle:
                first += 1
            first = min(first, place)
            taken = _taken(one.prompt, range(first, place + 1), room)
            if place not in taken:
                taken = _taken(one.prompt, range(place, first - 1, -1), room)
            taken[place] = taken.get(place, 0) + one.prompt - sum(taken.values())
            done = 0
            for at in sorted(taken):
                steps[at].chunks.append((number, taken[at], done))
                room[at] = max(room[at] - taken[at], 0)
                done += taken[at]


def _taken(tokens: int, places: Sequence[int], room: Sequence[int]) -> dict[int, int]:
    """How many of the tokens go where, if each place in turn takes as many as it has room for."""
    found = dict[int, int]()
    for at in places:
        if count := min(tokens, room[at]):
            found[at] = count
            tokens -= count
        if not tokens:
            break
    return found


def _parts(step: SeenStep, chunk: int) -> list[SeenStep]:
    """The step, or if nobody decodes and it holds more than a step can, so many steps one after
    the other, of which only the last emits."""
    if step.decodes or step.tokens <= chunk:
        return [step]
    count = -(-step.tokens // chunk)
    edges = np.linspace(step.start, step.end, count + 1).tolist()
    parts = [SeenStep(edges[i], edges[i + 1], step.after_idle and not i) for i in range(count)]
    parts[-1].received = step.received
    at, room = 0, chunk
    for number, tokens, before in step.chunks:
        while tokens:
            take = min(tokens, room)
            parts[at].chunks.append((number, take, before))
            tokens, before, room = tokens - take, before + take, room - take
            if not room:
                at, room = min(at + 1, count - 1), chunk
    return parts
