"""Which log-probabilities of prompts a step computes, and whose they are.

A step that computes the tokens [start, end) of a sequence knows what the model thinks of those at
start + 1 to end. Each is told once: what is computed again after a preemption is not told again,
and what a restored cache spares was told when it was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.device.batch_layout import Layout, PackedBatch
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.sched.step import Step

TOLD_AT_ONCE = 64
"""Tokens of a prompt in one `Output`, so that none is large, whatever the size of a step: 16 KiB in
what waits for its reader."""


@dataclass(frozen=True)
class Piece:
    """Tokens [first, end) of the prompt of a continuation, which is number `member` of a step."""

    member: int
    continuation: Continuation
    first: int
    end: int


def untold(members: Sequence[Continuation], step: Step) -> list[Piece]:
    """What the step is to tell. It counts as told from now on."""
    pieces = []
    for member, continuation in enumerate(members):
        if continuation.untold is None:
            continue
        length = len(continuation.request.prompt)
        first = max(int(step.start[member]) + 1, continuation.untold)
        end = min(int(step.end[member]) + 1, length)
        if first < end:
            pieces.append(Piece(member, continuation, first, end))
            continuation.untold = None if end == length else end
    return pieces


@dataclass(frozen=True)
class PromptLogprobs:
    """Those that a launched step computes. targets: int32 [T], see `Executor.submit`. at: where in
    it each piece begins."""

    pieces: Sequence[Piece]
    targets: np.ndarray
    at: Sequence[int]

    @classmethod
    def of_step(
        cls, pieces: Sequence[Piece], step: Step, layout: Layout, batch: PackedBatch
    ) -> PromptLogprobs | None:
        """None of no pieces. batch: of the step, by no decode layout."""
        if not pieces:
            return None
        targets, at = layout.no_targets(), []
        begins = layout.views(batch.buffer)["query_start"]
        place = {member: i for i, member in enumerate(batch.order.tolist())}
        for piece in pieces:
            before = piece.first - 1 - int(step.start[piece.member])
            begin = int(begins[place[piece.member]]) + before
            prompt = piece.continuation.request.prompt[piece.first : piece.end]
            targets[begin : begin + len(prompt)] = prompt
            at.append(begin)
        return cls(pieces, targets, at)

    def deliver(self, found: SampleResult) -> Iterator[tuple[Continuation, BaseException]]:
        """Hands out what the step has found, [T], to those that are not over. Yields those for whom
        that failed, each once, and has the others told all the same."""
        for piece, at in zip(self.pieces, self.at, strict=True):
            try:
                self._deliver(piece, at, found)
            except BaseException as error:
                yield piece.continuation, error

    def _deliver(self, piece: Piece, at: int, found: SampleResult) -> None:
        count, continuation = piece.end - piece.first, piece.continuation
        for begin in range(at, at + count, TOLD_AT_ONCE):
            if not continuation.finished:
                end = min(begin + TOLD_AT_ONCE, at + count)
                wanted = continuation.request.sampling.prompt_logprobs
                continuation.tell_prompt(entries(found, begin, end, wanted))


def entries(
    found: SampleResult, begin: int, end: int, wanted: int | None
) -> tuple[TokenLogprobs, ...]:
    """Of rows [begin, end), with as many alternatives each as wanted; none for None."""
    if wanted is None:
        return ()
    assert found.chosen_logprob is not None
    assert found.top_ids is not None and found.top_logprobs is not None
    rows = slice(begin, end)
    return tuple(
        TokenLogprobs(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            found.tokens[rows].tolist(),
            found.chosen_logprob[rows].tolist(),
            found.top_ids[rows, :wanted].tolist(),
            found.top_logprobs[rows, :wanted].tolist(),
            strict=True,
        )
    )
