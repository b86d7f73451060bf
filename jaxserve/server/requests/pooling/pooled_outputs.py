"""Serves calls for vectors and for scores from any frontend."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxserve.engine.output import Output
from jaxserve.sched.request import InvalidRequest
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_requests import EngineRequests, RequestFields
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUT_TOKENS, PooledCall
from jaxserve.server.requests.pooling.scoring import Pair, Scoring, pair_prompts

MAX_VALUES = 1 << 22
"""Numbers of one answer: 16 MiB of vectors, some 80 MB as JSON."""


async def vectors(
    requests: EngineRequests,
    shared: RequestFields,
    inputs: Sequence[str | Sequence[int]],
    field_name: str,
    record: CallRecord,
) -> list[Output]:
    """The last output of each input, with its vector.

    Args:
        requests: the way to the engine.
        shared: the fields that all inputs share, including `pooling`.
        inputs: the inputs, each text or token ids.
        field_name: the call's field with the inputs.
        record: the call's record.

    Raises:
        InvalidRequest: If a request cannot be served, or the answer would be too large.
        Exception: As `PooledCall` raises.
    """
    assert shared.pooling is not None
    width = shared.pooling.dimensions or requests.info().d_model
    return await _outputs(requests, shared, inputs, field_name, record, given=True, width=width)


async def scores(
    requests: EngineRequests,
    shared: RequestFields,
    pairs: Sequence[Pair],
    scoring: Scoring,
    tokens: Sequence[str | int] | None,
    template: str | None,
    record: CallRecord,
) -> list[tuple[float, Output | None]]:
    """The score of each pair, and the last output of its prompt if the pair has a prompt of its
    own.

    Args:
        requests: the way to the engine.
        shared: the fields that all prompts share.
        pairs: at least one pair.
        scoring: the server's defaults.
        tokens: the call's tokens instead, as in `pair_prompts`.
        template: likewise.
        record: the call's record.

    Raises:
        InvalidRequest: As in `pair_prompts`, or if a request cannot be served.
        Exception: As `PooledCall` raises.
    """
    usual, encode = requests.info().pooling, requests.encode_plainly
    asked = pairs, scoring, tokens, template, usual, encode
    made = await requests.run_beside(record.caller.name, pair_prompts, *asked)
    shared = dataclasses.replace(shared, pooling=made.pooling)
    by_tokens = bool(made.pooling.scored_token_ids)
    outputs = await _outputs(requests, shared, made.prompts, "documents", record, given=by_tokens)
    scored = made.scores([pooled(output) for output in outputs])
    if by_tokens:
        return list(zip(scored, outputs, strict=True))
    return [(score, None) for score in scored]


async def _outputs(
    requests: EngineRequests,
    shared: RequestFields,
    prompts: Sequence[str | Sequence[int]],
    field_name: str,
    record: CallRecord,
    *,
    given: bool,
    width: int = 0,
) -> list[Output]:
    """given: whether there is a prompt for each entry of the field, in their order."""
    try:
        wanted = await requests.make_requests(shared, prompts, MAX_INPUT_TOKENS)
    except InvalidRequest as error:
        name, _, place = error.field_name.partition(".")
        if name != "prompt":
            raise
        where = f"{field_name}.{place}" if place and given else field_name
        raise error.renamed(where) from None
    if len(wanted) * width > MAX_VALUES:
        problem = f"{len(wanted)} vectors of {width} numbers; at most {MAX_VALUES:,} numbers"
        raise InvalidRequest(field_name, f"{problem} are told in a call, so send fewer at once")
    return await PooledCall(requests, wanted, record).outputs()


def vector_base64(vector: np.ndarray) -> str:
    """The vector as base64 of little-endian float32 numbers."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def pooled(output: Output) -> np.ndarray:
    """The pooled values of a last output."""
    assert output.pooled is not None
    return output.pooled
