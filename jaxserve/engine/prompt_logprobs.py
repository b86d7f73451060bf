"""Which log-probabilities of prompts a step computes, and for which continuations.

A step that computes the tokens [start, end) of a sequence yields the log-probabilities of tokens
start + 1 to end. Each is reported once: tokens recomputed after a preemption are not reported
again, and those of a restored cache were reported when they were first computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.device.batch_layout import Layout, PackedBatch
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.errors import NotFinite
from jaxserve.engine.output import TokenLogprobs
from jaxserve.engine.sequence import Continuation
from jaxserve.sched.step import Step

TOLD_AT_ONCE = 64
"""Most prompt tokens in one `Output`, which bounds its size, whatever the size of a step: 16 KiB in
a caller's buffer."""


@dataclass(frozen=True)
class Piece:
    """Tokens [first, end) of one continuation's prompt, for which a step computes results.

    Attributes:
        member: index of the continuation in the step.
        continuation: the continuation.
        first: first token of the piece.
        end: the token after the last.
    """

    member: int
    continuation: Continuation
    first: int
    end: int


def prompt_logprob_pieces(members: Sequence[Continuation], step: Step) -> list[Piece]:
    """The pieces that the step reports, which count as reported from now on."""
    pieces = []
    for member, continuation in enumerate(members):
        if continuation.next_prompt_logprob is None:
            continue
        length = len(continuation.request.prompt)
        first = max(int(step.start[member]) + 1, continuation.next_prompt_logprob)
        end = min(int(step.end[member]) + 1, length)
        if first < end:
            pieces.append(Piece(member, continuation, first, end))
            continuation.next_prompt_logprob = None if end == length else end
    return pieces


@dataclass(frozen=True)
class PromptLogprobs:
    """The prompt log-probabilities that a launched step computes.

    Attributes:
        pieces: parts of prompts.
        targets: int32 [T], see `Executor.submit`.
        at: index in `targets` at which each piece begins.
    """

    pieces: Sequence[Piece]
    targets: np.ndarray
    at: Sequence[int]

    @classmethod
    def of_step(
        cls, pieces: Sequence[Piece], step: Step, layout: Layout, batch: PackedBatch
    ) -> PromptLogprobs | None:
        """The targets of a step; None if there are no pieces.

        Args:
            pieces: from `prompt_logprob_pieces` for the step.
            step: the booked step.
            layout: its layout, not a decode layout.
            batch: its packed rows.
        """
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
        """Streams the results [T] to the continuations that have not ended. Yields each
        continuation that fails, with the error, and goes on with the others."""
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
                if found.top_logprobs is not None and np.isnan(found.top_logprobs[begin:end]).any():
                    raise NotFinite
                continuation.tell_prompt(entries(found, begin, end, wanted))


def entries(
    found: SampleResult, begin: int, end: int, wanted: int | None
) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of rows [begin, end) of a step's results.

    Args:
        found: results of a step, as NumPy arrays.
        begin: first row.
        end: the row after the last.
        wanted: alternatives for each token; None returns nothing.
    """
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
