"""Which hidden states a step sums up, for which requests, and the resulting vectors.

A step that computes the tokens [start, end) of a prompt has their hidden states. Each is counted
once: tokens recomputed after a preemption are not counted again, and those of a restored cache were
counted when they were first computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.device.batch_layout import Layout, PackedBatch
from jaxserve.engine.device.pooling_step import Pooled, Wanted, from_digits
from jaxserve.engine.errors import NotFinite
from jaxserve.engine.prompt_logprobs import Piece
from jaxserve.engine.sequence import Continuation
from jaxserve.sched.request import PoolingParams, PoolingType, Request
from jaxserve.sched.step import Step

_TINY = 1e-12  # a vector of zeros stays zero


def pooled_pieces(members: Sequence[Continuation], step: Step) -> list[Piece]:
    """The pieces of the step, which count as done from now on."""
    pieces = []
    for member, continuation in enumerate(members):
        if continuation.next_pooled_token is None:
            continue
        wanted = _wanted(continuation.request)[1]
        first = max(int(step.start[member]), continuation.next_pooled_token, wanted.start)
        end = min(int(step.end[member]), wanted.stop)
        if first < end:
            pieces.append(Piece(member, continuation, first, end))
            continuation.next_pooled_token = None if end == wanted.stop else end
    return pieces


def _wanted(request: Request) -> tuple[PoolingParams, range]:
    """What the request wants, and the tokens whose hidden states or logits this takes."""
    params, length = request.pooling, len(request.prompt)
    assert params is not None
    if not params.needs_all:
        return params, range(length - 1, length)
    return params, range(1 if params.pooling is PoolingType.CLS else length)


@dataclass(frozen=True)
class Pooling:
    """The pooled results of a launched step.

    Attributes:
        pieces: parts of prompts. The hidden states of piece i are summed up at index i.
        wanted: see `Executor.submit`.
        rows: index of the logits of each piece's row in the step's result.
    """

    pieces: Sequence[Piece]
    wanted: Wanted
    rows: Sequence[int]

    @classmethod
    def of_step(
        cls, pieces: Sequence[Piece], step: Step, layout: Layout, batch: PackedBatch
    ) -> Pooling | None:
        """The pooling of a step; None if there are no pieces.

        Args:
            pieces: from `pooled_pieces` for the step.
            step: the booked step.
            layout: its layout, not a decode layout.
            batch: its packed rows.
        """
        if not pieces:
            return None
        wanted, rows = Wanted.nothing(layout), []
        begins = layout.views(batch.buffer)["query_start"]
        order = {member: i for i, member in enumerate(batch.order.tolist())}
        for place, piece in enumerate(pieces):
            i, (params, _) = order[piece.member], _wanted(piece.continuation.request)
            begin = int(begins[i]) + piece.first - int(step.start[piece.member])
            wanted.places[begin : begin + piece.end - piece.first] = place
            row = int(batch.begins[i])
            wanted.scored[row, : len(params.scored_token_ids)] = params.scored_token_ids
            rows.append(row)
        return cls(pieces, wanted, rows)

    def deliver(self, found: Pooled) -> Iterator[tuple[Continuation, BaseException]]:
        """Hands the results, NumPy arrays, to the continuations that have not ended. Yields each
        continuation that fails, with the error, and goes on with the others."""
        for place, (piece, row) in enumerate(zip(self.pieces, self.rows, strict=True)):
            continuation = piece.continuation
            if continuation.finished:
                continue
            try:
                params, _ = _wanted(continuation.request)
                scored = len(params.scored_token_ids)
                part = np.array(found.scores[row, :scored])
                if not scored:
                    part = np.where(found.finite[place], found.sums[place], np.nan)
                before = continuation.pooled
                continuation.pooled = part if before is None else before + part
            except BaseException as error:
                yield continuation, error


def vector_of(continuation: Continuation) -> np.ndarray:
    """The continuation's result, float32, once all of its tokens are counted.

    Raises:
        NotFinite: the model computed values that are not numbers.
    """
    params, tokens = _wanted(continuation.request)
    total = continuation.pooled
    assert total is not None and continuation.next_pooled_token is None
    if not np.isfinite(total).all():
        raise NotFinite
    if params.scored_token_ids:
        return total
    mean = from_digits(total)[: params.dimensions] / len(tokens)
    if params.normalize:
        mean /= max(float(np.sqrt(mean @ mean)), _TINY)
    return mean.astype(np.float32)
