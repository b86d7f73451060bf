"""A line of a batch and its result, and their JSON in the journal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.engine.output import FinishReason, Timings, TokenLogprobs, Usage
from jaxserve.sched.request import (
    Grammar,
    GrammarKind,
    InvalidRequest,
    PoolingParams,
    PoolingType,
    Thinking,
    Tier,
)
from jaxserve.server.access.api_keys import Caller
from jaxserve.server.batches.records import NewLine
from jaxserve.server.requests.call_errors import call_error_of
from jaxserve.server.requests.engine_requests import EngineRequests, RequestFields

MAX_LINE_BYTES = 4 << 20
"""Most bytes of a line's JSON in the journal. It is ASCII, so this is a prompt of four million
Latin characters, of 700,000 others, or of half a million token ids."""


@dataclass(frozen=True)
class Line:
    """One line of a batch: a prompt and how to continue it.

    Attributes:
        prompt: text, or token ids.
        sampling: the `SamplingParams` fields that were given, by name.
        name: the client's id of the line, or empty.
        cache_salt: as `Request.cache_salt`.
        prediction: as in `RequestFields`.
        note: JSON values by name, which its frontend gets back with the result.
        pooling: the vector that is wanted in place of text; None generates.
    """

    prompt: str | tuple[int, ...]
    sampling: Mapping[str, Any]
    name: str = ""
    cache_salt: str = ""
    prediction: str = ""
    note: Mapping[str, Any] = field(default_factory=dict)
    pooling: PoolingParams | None = None

    def to_json(self) -> str:
        """The line as JSON. Equal lines have equal texts, even if one was stored by an older server
        that had no salts, predictions, notes or vectors."""
        fields = _fields(self)
        for name in ("cache_salt", "prediction", "note", "pooling"):
            if not fields[name]:
                fields = {other: value for other, value in fields.items() if other != name}
        return json.dumps(fields, default=_fields, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Line:
        """The inverse of `to_json`."""
        line = cls(**_frozen(json.loads(text)))
        sampling = dict(line.sampling)
        if (grammar := sampling.get("grammar")) is not None:
            sampling["grammar"] = Grammar(GrammarKind(grammar["kind"]), grammar["text"])
        if (thinking := sampling.get("thinking")) is not None:
            sampling["thinking"] = Thinking(**thinking)
        made: Any = line.pooling  # its fields by name
        if made is not None:
            made = PoolingParams(**{**made, "pooling": PoolingType(made["pooling"])})
        return replace(line, sampling=sampling, pooling=made)

    @property
    def continuations(self) -> int:
        """Number of continuations that the line asks for."""
        return int(self.sampling.get("n", 1))

    def fields(self, caller: Caller | None = None) -> RequestFields:
        """The fields of its request. caller: the batch's owner."""
        return RequestFields(
            self.prompt,
            self.sampling,
            tier=Tier.BEST_EFFORT,
            cache_salt=self.cache_salt,
            caller=caller,
            prediction=self.prediction,
            pooling=self.pooling,
        )

    def checked(
        self,
        requests: EngineRequests,
        tenant: str,
        problem: InvalidRequest | None = None,
        named: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> NewLine:
        """The line for the journal. It gets an error as its result if it is too large, its frontend
        found a problem, or the engine would refuse it. Call this on a thread that may block, see
        `EngineRequests.read_lines`.

        Args:
            requests: builds the request, to check it.
            tenant: owner of the batch.
            problem: what the frontend found wrong.
            named: context in which the request is built; it renames fields in errors to the
                frontend's names.
        """
        text = self.to_json()
        try:
            if len(text) > MAX_LINE_BYTES:
                limits = f"takes {len(text):,} bytes; at most {MAX_LINE_BYTES:,} are allowed"
                text = hashlib.sha256(text.encode()).hexdigest()  # only compared, so a hash will do
                raise InvalidRequest("line", limits)
            if problem is not None:
                raise problem
            with named():
                if (grammar := self.sampling.get("grammar")) is not None:
                    requests.wait_for_grammar(grammar, self.sampling.get("thinking"), tenant)
                requests.build_request(self.fields())
        except InvalidRequest as error:
            failed = Result(self.name, error=LineError.from_error(error))
            return NewLine(text, failed.to_json(), self.name)
        return NewLine(text, name=self.name)


NO_ROOM = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True)
class LineError:
    """Why a line failed. code: name of the gRPC status."""

    code: str
    message: str

    @classmethod
    def from_error(cls, error: Exception) -> LineError:
        """The error of a line whose request could not be built or served."""
        known = call_error_of(error)
        return cls("INTERNAL" if known is None else known.grpc_code, str(error))

    @classmethod
    def no_room(cls, size: int) -> LineError:
        """The error for a result of `size` bytes that does not fit into the owner's quota."""
        problem = f"has {size:,} bytes, for which the batches of the key have no room"
        return cls(NO_ROOM, f"the result {problem} (server.batch_gib); delete some")


@dataclass(frozen=True)
class Completion:
    """One finished continuation of a line.

    Attributes:
        index: which of the n continuations.
        text: the generated text.
        token_ids: the generated tokens.
        finish_reason: why it ended.
        usage: token counts.
        timings: seconds.
        logprobs: one entry per generated token, if asked for.
        prompt_logprobs: one entry per token of the prompt from the second on, if asked for.
        pooled: the vector, if one was asked for, as base64 of float32 numbers.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: str = ""


@dataclass(frozen=True)
class Result:
    """The result of a line: completions, or an error.

    Attributes:
        name: the client's id of the line, or empty.
        completions: by index.
        error: why the line failed; None if it did not.
        note: the line's note.
    """

    name: str
    completions: tuple[Completion, ...] = ()
    error: LineError | None = None
    note: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The result as JSON, for the journal."""
        return json.dumps(self, default=_fields)

    @classmethod
    def from_json(cls, text: str) -> Result:
        """The inverse of `to_json`."""
        result = json.loads(text, parse_float=lambda number: float(number))  # see `_fields`
        error = result["error"]
        completions = tuple(_completion(completion) for completion in result["completions"])
        failed = None if error is None else LineError(**error)
        return cls(result["name"], completions, failed, result.get("note", {}))


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass's fields, for json. It is deliberately not a C function: json calls it for each
    entry of a long result, and other threads can run whenever it does. A text's result can be read
    by a server that makes no batches of vectors."""
    fields = vars(value)
    if isinstance(value, Completion) and not value.pooled:
        return {name: each for name, each in fields.items() if name != "pooled"}
    return fields


def _completion(fields: dict[str, Any]) -> Completion:
    fields["finish_reason"] = FinishReason(fields["finish_reason"])
    fields["usage"] = Usage(**fields["usage"])
    fields["timings"] = Timings(**_frozen(fields["timings"]))
    fields["token_ids"] = tuple(fields["token_ids"])
    for name in ("logprobs", "prompt_logprobs"):
        fields[name] = tuple(
            TokenLogprobs(entry["token_id"], entry["logprob"], _frozen(entry["top"]))
            for entry in fields.get(name, ())  # older journals have no prompt_logprobs
        )
    return Completion(**fields)


def _frozen(value: Any) -> Any:
    """The value with all nested lists turned back into tuples."""
    if isinstance(value, dict):
        return {name: _frozen(item) for name, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
