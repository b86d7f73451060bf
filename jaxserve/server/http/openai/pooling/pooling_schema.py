"""The bodies of requests for vectors and scores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StrictBool, StrictStr

from jaxserve.sched.request import MAX_SCORED_TOKENS
from jaxserve.server.http.openai.schema import (
    Int32,
    Targeted,
    Text,
    TokenId,
    checked_prompts,
    wrong_entry,
)
from jaxserve.server.requests.pooling.pooled_call import MAX_INPUTS

Inputs = Annotated[
    Any,
    PlainValidator(
        lambda value: checked_prompts(value, MAX_INPUTS),
        json_schema_input_type=str | list[str] | list[TokenId] | list[list[TokenId]],
    ),
]
PoolingName = Literal["last", "mean", "cls"]


def _texts(value: Any) -> list[str]:
    """Texts given as strings, or as objects with only a `text`."""
    if not isinstance(value, list):
        raise ValueError("must be a list of texts")
    if not 1 <= len(value) <= MAX_INPUTS:
        raise ValueError(f"has {len(value)} texts; 1 to {MAX_INPUTS} are taken in a call")
    texts: list[str] = []
    for place, entry in enumerate(value):
        text = entry.get("text") if isinstance(entry, dict) and len(entry) == 1 else entry
        if isinstance(text, str):
            texts.append(text)
        else:
            wrong_entry(place, "must be a string, or an object with a text")
    return texts


Texts = Annotated[
    Any, PlainValidator(_texts, json_schema_input_type=list[str] | list[dict[str, str]])
]
OneOrMoreTexts = Annotated[
    Any,
    PlainValidator(
        lambda value: [value] if isinstance(value, str) else _texts(value),
        json_schema_input_type=str | list[str],
    ),
]
Tokens = Annotated[list[TokenId | Text], Field(max_length=MAX_SCORED_TOKENS, fail_fast=True)]


class EmbeddingRequest(Targeted):
    """POST /v1/embeddings and /pooling. pooling, normalize: override the checkpoint's."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None
    pooling: PoolingName | None = None
    normalize: StrictBool | None = None


class PairScoring(Targeted):
    """The common fields of calls for scores. tokens, template: override the server's."""

    tokens: Tokens | None = None
    template: Text | None = None


class ScoreRequest(PairScoring):
    """POST /score: one text with one or several others, or equally many of both. vLLM has both
    pairs of names."""

    text_1: OneOrMoreTexts | None = None
    text_2: OneOrMoreTexts | None = None
    queries: OneOrMoreTexts | None = None
    documents: OneOrMoreTexts | None = None


class RerankRequest(PairScoring):
    """POST /rerank. top_n: number of documents to return, the best first; 0 or null returns all."""

    query: StrictStr
    documents: Texts
    top_n: Annotated[Int32, Field(ge=0)] | None = None
    return_documents: StrictBool = True
