"""POST /v1/embeddings, /pooling, /score and /rerank."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from jaxserve.engine.output import Output
from jaxserve.sched.request import InvalidRequest, PoolingParams
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
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUTS
from jaxserve.server.requests.pooling.pooled_outputs import pooled, scores, vector_base64, vectors
from jaxserve.server.requests.pooling.scoring import Pair, pairs_of

_INLINE_VALUES = 2048
_PIECE_BYTES = 256 << 10  # of an answer, sent as it is encoded


def add_pooling_routes(app: FastAPI, context: RouteContext) -> None:
    """Adds the routes of vectors and scores."""

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        """A vector for each text."""
        return await vectors_response(context, body, http, _form("embedding", "embedding"))

    @app.post("/pooling")
    async def pooling(body: EmbeddingRequest, http: HttpRequest) -> Response:
        """Vectors in the format of vLLM."""
        return await vectors_response(context, body, http, _form("pooling", "data"))

    async def score(body: ScoreRequest, http: HttpRequest) -> Response:
        """Scores of pairs of texts."""
        answer = _Pooled(context, body, http)
        try:
            scores = await answer.scores(_pairs(body))
        except InvalidRequest as error:
            name, dot, place = error.field_name.partition(".")
            if name != "documents" or body.text_2 is None:
                raise
            raise error.renamed(f"text_2{dot}{place}") from None
        data = [
            {"index": place, "object": "score", "score": score, **slo}
            for place, (score, slo) in enumerate(scores)
        ]
        return _json({**answer.head("score"), "object": "list", "data": data, **answer.usage()})

    async def rerank(body: RerankRequest, http: HttpRequest) -> Response:
        """The documents, best matches for the query first."""
        answer = _Pooled(context, body, http)
        scores = await answer.scores([(body.query, text) for text in body.documents])
        best = sorted(range(len(scores)), key=lambda place: -scores[place][0])
        results = []
        for place in best[: body.top_n or len(best)]:
            score, slo = scores[place]
            result = {"index": place, "relevance_score": score, **slo}
            if body.return_documents:
                result["document"] = {"text": body.documents[place]}
            results.append(result)
        fields = {**answer.head("rerank"), "results": results, **answer.usage()}
        size = sum(map(len, body.documents)) if body.return_documents else 0
        if size <= INLINE_LENGTH:
            return _json(fields)
        return await context.requests.run_beside(record_of(http).caller.name, _json, fields)

    for path in ("/score", "/v1/score"):
        app.post(path)(score)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        app.post(path)(rerank)


class _Pooled:
    """The requests of one call, and the common part of all answers."""

    def __init__(self, context: RouteContext, body: Targeted, http: HttpRequest) -> None:
        self._context, self._body, self._http = context, body, http
        self._record: CallRecord = record_of(http)

        self._shared = context.shared_fields(body, {}, self._record.caller)

    async def vectors(
        self, inputs: Sequence[str | list[int]], pooling: PoolingParams
    ) -> list[Output]:
        """The last output of each input."""
        shared = dataclasses.replace(self._shared, pooling=pooling)
        made = vectors(self._context.requests, shared, inputs, "input", self._record)
        return await unless_gone(self._http, made)

    async def scores(self, pairs: Sequence[Pair]) -> list[tuple[float, dict[str, Any]]]:
        """The score of each pair, and the verdict on its targets if the pair has a prompt of its
        own."""
        context, body = self._context, self._body
        assert isinstance(body, PairScoring)
        said = (context.scoring, body.tokens, body.template)
        made = scores(context.requests, self._shared, pairs, *said, self._record)
        scored = await unless_gone(self._http, made)
        return [(score, {} if last is None else slo_fields(last)) for score, last in scored]

    def head(self, prefix: str) -> dict[str, Any]:
        """The first fields of an answer."""
        named = {"id": f"{prefix}-{self._record.request_id}", "created": int(time.time())}
        adapter = self._record.requests[0].adapter
        return {**named, "model": adapter or self._context.model}

    def usage(self) -> dict[str, Any]:
        """The last field of an answer."""
        return _usage(self._record)


def _usage(record: CallRecord) -> dict[str, Any]:
    tokens, cached = record.prompt_tokens, record.cached_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}}


def _pairs(body: ScoreRequest) -> list[Pair]:
    named = {name: getattr(body, name) for name in ("text_1", "text_2", "queries", "documents")}
    fields = {name: texts for name, texts in named.items() if texts is not None}
    if fields.keys() not in ({"text_1", "text_2"}, {"queries", "documents"}):
        raise InvalidRequest("text_1", "text_1 and text_2, or queries and documents, are needed")
    (_, first), (name, second) = fields.items()
    return pairs_of(first, second, name)


class VectorsForm(NamedTuple):
    """The form of an answer with vectors.

    Attributes:
        name: field with the list of entries.
        head: the other fields, of the model's name and the call's record.
        entry: an entry, of its place, its vector in JSON's types, and its output.
    """

    name: str
    head: Callable[[str, CallRecord], dict[str, Any]]
    entry: Callable[[int, Any, Output], Any]


def _form(kind: str, name: str) -> VectorsForm:
    """OpenAI's and vLLM's. kind: `object` of an entry. name: name of its field with the vector."""

    def head(model: str, record: CallRecord) -> dict[str, Any]:
        named = {"id": f"embd-{record.request_id}", "created": int(time.time())}
        return {**named, "model": model, "object": "list", **_usage(record)}

    def entry(place: int, vector: Any, output: Output) -> dict[str, Any]:
        return {"object": kind, "index": place, **slo_fields(output), name: vector}

    return VectorsForm("data", head, entry)


async def vectors_response(
    context: RouteContext, body: EmbeddingRequest, http: HttpRequest, form: VectorsForm
) -> Response:
    """The vectors of a call's inputs.

    Args:
        context: what the routes need.
        body: the call's body.
        http: the call.
        form: the answer's form.
    """
    info, answer = context.requests.info(), _Pooled(context, body, http)
    tenant = record_of(http).caller.name
    pooling = info.pooling.with_own(body.pooling, body.normalize, body.dimensions)
    width = pooling.dimensions or info.d_model
    outputs = await answer.vectors(prompts_in(body.input, "input", MAX_INPUTS), pooling)
    record = record_of(http)
    fields = form.head(record.requests[0].adapter or context.model, record)
    pieces = _pieces(fields, outputs, form, base=body.encoding_format == "base64")
    if len(outputs) * width <= _INLINE_VALUES:
        return Response(b"".join(pieces), media_type="application/json")

    async def beside() -> AsyncIterator[bytes]:
        while piece := await context.requests.run_beside(tenant, _next, pieces):
            yield piece

    return StreamingResponse(beside(), media_type="application/json")


def _pieces(
    fields: dict[str, Any], outputs: Sequence[Output], form: VectorsForm, *, base: bool
) -> Iterator[bytes]:
    """The answer's JSON, vector by vector."""
    begin = to_json(fields)[:-1] + b',"%s":[' % form.name.encode()
    for place, output in enumerate(outputs):
        vector = pooled(output)
        encoded: Any = vector_base64(vector) if base else vector.tolist()
        yield begin + to_json(form.entry(place, encoded, output))
        begin = b","
    yield b"]}"


def _next(pieces: Iterator[bytes]) -> bytes:
    """The next pieces that are sent at once; empty at the end."""
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            break
    return b"".join(taken)


def _json(fields: dict[str, Any]) -> Response:
    return Response(to_json(fields), media_type="application/json")
