"""Between the messages about vectors and scores and the engine's own types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from jaxserve.engine.output import Output, Usage
from jaxserve.sched.request import InvalidRequest, PoolingParams, at_most_entries
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.grpc import message_conversion
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.engine_requests import RequestFields
from jaxserve.server.requests.milliseconds import timings_ms
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUTS
from jaxserve.server.requests.pooling.pooled_outputs import pooled
from jaxserve.server.requests.pooling.scoring import Pair, pairs_of

_MESSAGE_VALUES = 1 << 16  # values per message: clients take 4 MiB by default


def embed_fields(message: pb.EmbedRequest, caller: Caller, usual: PoolingParams) -> RequestFields:
    """The fields that all inputs of a message share. usual: how the model's vectors are made by
    default. Raises InvalidRequest."""
    message_conversion.check_unknown_fields("request", message)
    message_conversion.cache_key_of(message)
    kinds = message_conversion.POOLING_TYPES
    pooling = usual.with_own(
        message_conversion.known_value("pooling", message.pooling, kinds, pb.PoolingType),
        message.normalize if message.HasField("normalize") else None,
        message.dimensions if message.HasField("dimensions") else None,
    )
    shared = message_conversion.shared_fields(message, caller)
    return RequestFields("", {}, **shared, pooling=pooling)


def inputs_of(message: pb.EmbedRequest) -> list[str | Sequence[int]]:
    """The prompts, each text or token ids. Raises InvalidRequest."""
    at_most_entries("inputs", len(message.inputs), MAX_INPUTS)
    if not message.inputs:
        raise InvalidRequest("inputs", f"has none; 1 to {MAX_INPUTS} are taken")
    return [
        message_conversion.prompt_from_message(entry, f"inputs.{place}")
        for place, entry in enumerate(message.inputs)
    ]


def embed_responses(request_id: str, outputs: Sequence[Output]) -> Iterator[pb.EmbedResponse]:
    """Messages with the vectors, in order."""
    response, size = pb.EmbedResponse(request_id=request_id), 0
    for index, output in enumerate(outputs):
        vector = pooled(output)
        if size and size + len(vector) > _MESSAGE_VALUES:
            yield response
            response, size = pb.EmbedResponse(request_id=request_id), 0
        size += len(vector)
        assert output.usage is not None and output.timings is not None
        response.embeddings.add(
            index=index,
            values=vector.tolist(),
            usage=pb.Usage(**asdict(output.usage)),
            timings=pb.Timings(**timings_ms(output.timings)),
            slo=_verdict(output),
        )
    yield response


def score_fields(message: pb.ScoreRequest, caller: Caller) -> RequestFields:
    """The fields that all prompts of a message share. Raises InvalidRequest."""
    for name, texts in (("queries", message.queries), ("documents", message.documents)):
        at_most_entries(name, len(texts), MAX_INPUTS)
        if not texts:
            raise InvalidRequest(name, f"has none; 1 to {MAX_INPUTS} are taken")
    message_conversion.check_unknown_fields("request", message)
    return RequestFields("", {}, **message_conversion.shared_fields(message, caller))


def pairs_from_message(message: pb.ScoreRequest) -> list[Pair]:
    """Pairs of query and document. Raises InvalidRequest."""
    return pairs_of(list(message.queries), list(message.documents), "documents")


def tokens_from_message(message: pb.ScoreRequest) -> list[str | int] | None:
    """The answer tokens as texts or ids; None if the message leaves them to the server. Raises
    InvalidRequest."""
    if not message.HasField("tokens"):
        return None
    tokens: list[str | int] = []
    for place, token in enumerate(message.tokens.tokens):
        which = token.WhichOneof("token")
        if which is None:
            raise InvalidRequest(f"tokens.{place}", "is empty; set text or id")
        tokens.append(getattr(token, which))
    return tokens


def score_response(
    request_id: str, scores: Sequence[tuple[float, Output | None]], outputs: Sequence[Output]
) -> pb.ScoreResponse:
    """The message with all scores. outputs: the last output of each prompt."""
    usages = [each.usage for each in outputs if each.usage is not None]
    names = [field.name for field in fields(Usage)]
    usage = pb.Usage(**{name: sum(getattr(each, name) for each in usages) for name in names})
    return pb.ScoreResponse(
        request_id=request_id,
        scores=[
            pb.Score(score=score, slo=None if last is None else _verdict(last))
            for score, last in scores
        ],
        usage=usage,
    )


def _verdict(output: Output) -> pb.SloVerdict | None:
    verdict = output.verdict
    return None if verdict is None else message_conversion.verdict_message(verdict)
