"""POST /v1/embeddings, /pooling, /score and /rerank."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from jaxserve.engine.output import Output
from jaxserve.sched.request import InvalidRequest, PoolingParams, Request
from jaxserve.server.http.errors import record_of
from jaxserve.server.http.openai.choices import slo_fields
from jaxserve.server.http.openai.completions import prompts_in
from jaxserve.server.http.openai.multi_prompt import unless_gone
from jaxserve.server.http.openai.pooling.pooling_schema import (
    EmbeddingRequest,
    PairScoring,
    RerankRequest,
    ScoreRequest,
)
from jaxserve.server.http.openai.route_context import RouteContext
from jaxserve.server.http.openai.schema import Targeted
from jaxserve.server.requests.call_outcome import CallRecord
from jaxserve.server.requests.engine_requests import INLINE_LENGTH
from jaxserve.server.requests.pooling.pooled_call import (
    MAX_INPUT_TOKENS,
    MAX_INPUTS,
    PooledCall,
)
from jaxserve.server.requests.pooling.scoring import Pair, pair_prompts

MAX_VALUES = 1 << 22
"""Numbers of one answer: 16 MiB of vectors, some 80 MB as JSON."""
_INLINE_VALUES = 2048
_PIECE_BYTES = 256 << 10  # of an answer that is sent as it is made


def add_pooling_routes(app: FastAPI, context: RouteContext) -> None:
    """Adds them."""

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        """A vector of each text."""
        return await _vectors(context, body, http, "embedding", "embedding")

    @app.post("/pooling")
    async def pooling(body: EmbeddingRequest, http: HttpRequest) -> Response:
        """The same in vLLM's shape."""
        return await _vectors(context, body, http, "pooling", "data")

    async def score(body: ScoreRequest, http: HttpRequest) -> Response:
        """How well pairs of texts go together."""
        answer = _Pooled(context, body, http)
        data = [
            {"index": place, "object": "score", "score": score, **slo}
            for place, (score, slo) in enumerate(await answer.scores(_pairs(body)))
        ]
        return _json({**answer.head("score"), "object": "list", "data": data, **answer.usage()})

    async def rerank(body: RerankRequest, http: HttpRequest) -> Response:
        """The documents, those first that suit the query best."""
        answer = _Pooled(context, body, http)
        found = await answer.scores([(body.query, text) for text in body.documents])
        best = sorted(range(len(found)), key=lambda place: -found[place][0])
        results = []
        for place in best[: body.top_n or len(best)]:
            score, slo = found[place]
            result = {"index": place, "relevance_score": score, **slo}
            if body.return_documents:
                result["document"] = {"text": body.documents[place]}
            results.append(result)
        fields = {**answer.head("rerank"), "results": results, **answer.usage()}
        size = sum(map(len, body.documents)) if body.return_documents else 0
        if size <= INLINE_LENGTH:
            return _json(fields)
        return await context.requests.run_beside(_json, fields)

    for path in ("/score", "/v1/score"):
        app.post(path)(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path)(rerank)


class _Pooled:
    """The requests of one call, and what all answers have."""

    def __init__(self, context: RouteContext, body: Targeted, http: HttpRequest) -> None:
        self._context, self._body, self._http = context, body, http
        self._record: CallRecord = record_of(http)
        self._model = context.model

    async def outputs(
        self,
        prompts: Sequence[str | Sequence[int]],
        pooling: PoolingParams,
        field_name: str,
        check: Callable[[Sequence[Request]], None] = lambda wanted: None,
    ) -> list[Output]:
        """Serves the prompts.

        Args:
            prompts: text or token ids each.
            pooling: what is wanted of each.
            field_name: of the body, in which they came.
            check: raises InvalidRequest for requests that make too much of an answer.
        """
        context = self._context
        try:
            wanted = await context.make_requests(
                self._body, prompts, {}, self._record.caller, pooling, MAX_INPUT_TOKENS
            )
        except InvalidRequest as error:
            if error.field_name != "prompt":
                raise
            raise InvalidRequest(field_name, error.problem) from None
        check(wanted)
        self._model = wanted[0].adapter or context.model
        call = PooledCall(context.requests, wanted, self._record)
        return await unless_gone(self._http, call.outputs())

    async def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, dict[str, Any]]]:
        """Of each pair, and how its targets were met, where one prompt is for it alone."""
        context, body = self._context, self._body
        assert isinstance(body, PairScoring)
        made = await context.requests.run_beside(
            pair_prompts,
            *(pairs, context.scoring, body.tokens, body.template),
            *(context.requests.info().pooling, context.encode_plainly),
        )
        outputs = await self.outputs(made.prompts, made.pooling, "documents")
        scores = made.scores([_pooled(output) for output in outputs])
        alone = len(outputs) == len(pairs)
        slo = [slo_fields(output) for output in outputs] if alone else [{} for _ in pairs]
        return list(zip(scores, slo, strict=True))

    def head(self, prefix: str) -> dict[str, Any]:
        """What an answer begins with."""
        named = {"id": f"{prefix}-{self._record.request_id}", "created": int(time.time())}
        return {**named, "model": self._model}

    def usage(self) -> dict[str, Any]:
        """What it ends with."""
        tokens, cached = self._record.prompt_tokens, self._record.cached_tokens
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}


def _pairs(body: ScoreRequest) -> list[Pair]:
    named = {name: getattr(body, name) for name in ("text_1", "text_2", "queries", "documents")}
    given = {name: texts for name, texts in named.items() if texts is not None}
    if given.keys() not in ({"text_1", "text_2"}, {"queries", "documents"}):
        raise InvalidRequest("text_1", "text_1 and text_2, or queries and documents, are needed")
    (_, first), (name, second) = given.items()
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        problem = f"has {len(second)} texts beside {len(first)}; as many are needed, or one and any"
        raise InvalidRequest(name, problem)
    return list(zip(first, second, strict=True))


async def _vectors(
    context: RouteContext, body: EmbeddingRequest, http: HttpRequest, kind: str, name: str
) -> Response:
    """kind: `object` of an entry. name: of its field with the vector."""
    info, answer = context.requests.info(), _Pooled(context, body, http)
    pooling = info.pooling.with_own(body.pooling, body.normalize, body.dimensions)
    width = pooling.dimensions or info.d_model

    def check(wanted: Sequence[Request]) -> None:
        if len(wanted) * width > MAX_VALUES:
            problem = f"{len(wanted)} vectors of {width} numbers; at most {MAX_VALUES:,} numbers"
            raise InvalidRequest("input", f"{problem} are told in a call, so send fewer at once")

    prompts = prompts_in(body.input, "input", MAX_INPUTS)
    outputs = await answer.outputs(prompts, pooling, "input", check)
    fields = {**answer.head("embd"), "object": "list", **answer.usage()}
    pieces = _pieces(fields, outputs, kind, name, base=body.encoding_format == "base64")
    if len(outputs) * width <= _INLINE_VALUES:
        return Response(b"".join(pieces), media_type="application/json")

    async def beside() -> AsyncIterator[bytes]:
        while piece := await context.requests.run_beside(_next, pieces):
            yield piece

    return StreamingResponse(beside(), media_type="application/json")


def _pieces(
    fields: dict[str, Any], outputs: Sequence[Output], kind: str, name: str, *, base: bool
) -> Iterator[bytes]:
    """The answer's JSON, vector by vector."""
    begin = to_json(fields)[:-1] + b',"data":['
    for place, output in enumerate(outputs):
        found = _pooled(output)
        told: Any = base64.b64encode(found.astype("<f4").tobytes()) if base else found.tolist()
        entry = {"object": kind, "index": place, **slo_fields(output), name: told}
        yield begin + to_json(entry)
        begin = b","
    yield b"]}"


def _next(pieces: Iterator[bytes]) -> bytes:
    """As many as are sent at once; nothing at the end."""
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            break
    return b"".join(taken)


def _pooled(output: Output) -> np.ndarray:
    assert output.pooled is not None
    return output.pooled


def _json(fields: dict[str, Any]) -> Response:
    return Response(to_json(fields), media_type="application/json")
