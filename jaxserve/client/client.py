"""`Client`: calls a jaxserve server over gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from jaxserve.client.connection import Tls, key_metadata, open_channel
from jaxserve.client.errors import explained
from jaxserve.client.messages import make_embed_request, make_request, make_score_request
from jaxserve.server.proto import batches_pb2, batches_pb2_grpc, generation_pb2_grpc
from jaxserve.server.proto import generation_pb2 as pb

DEFAULT_ADDRESS = "localhost:50051"
_BATCH_CALL_S = 120.0  # timeout of batch calls without results


@dataclass
class Completion:
    """One finished continuation.

    Attributes:
        index: which of the n continuations.
        text: the generated text, without a stop token.
        token_ids: the generated tokens, a stop token included.
        logprobs: one entry per generated token, if asked for.
        finish_reason: "stop" or "length".
        usage: token counts.
        timings: milliseconds.
        slo: whether the request's targets were met; None if it had none.
        prompt_logprobs: one entry per token of the prompt from the second on, if asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    timings: pb.Timings = field(default_factory=pb.Timings)
    slo: pb.SloVerdict | None = None
    prompt_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)

    def finish(self, message: pb.Finish) -> None:
        """Sets how the continuation ended."""
        name = pb.FinishReason.Name(message.reason)
        self.finish_reason = name.removeprefix("FINISH_REASON_").lower()
        self.usage, self.timings = message.usage, message.timings
        self.slo = message.slo if message.HasField("slo") else None

    @classmethod
    def from_message(cls, message: batches_pb2.Completion) -> Completion:
        """The continuation of a batch's line."""
        tokens, logprobs = list(message.token_ids), list(message.logprobs)
        completion = cls(message.index, message.text, tokens, logprobs)
        completion.prompt_logprobs = list(message.prompt_logprobs)
        completion.finish(message.finish)
        return completion


@dataclass
class Embedding:
    """The vector of an input.

    Attributes:
        embedding: the vector, as float32 numbers.
        usage: token counts; a vector counts as one output token.
        timings: milliseconds.
        slo: whether the call's targets were met for it; None if it had none.
    """

    embedding: list[float]
    usage: pb.Usage
    timings: pb.Timings
    slo: pb.SloVerdict | None

    @classmethod
    def from_message(cls, message: pb.Embedding) -> Embedding:
        """The vector of an input of Embed."""
        slo = message.slo if message.HasField("slo") else None
        return cls(list(message.values), message.usage, message.timings, slo)


T = TypeVar("T")


class Call(Iterator[T]):
    """A running call, as an iterator over its messages. Dropping it cancels the call."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def __next__(self) -> T:
        """Raises ServerError."""
        try:
            message: T = next(self._call)
            return message
        except grpc.RpcError as error:
            raise explained(error, self._address) from None

    def cancel(self) -> None:
        """Ends the call. Does nothing if it has ended."""
        self._call.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client:
    """A connection to one server. Thread-safe: any number of calls may run at once. Every method
    raises ServerError, or Unreachable if no server answers.

    Args:
        address: "host:port".
        api_key: API key for servers that need one; None takes the environment's JAXSERVE_API_KEY,
            if set.
        tls: TLS settings; None connects in the clear.

    Raises:
        ValueError: If the API key is malformed, or only one of a certificate and its key is given.
        OSError: If a file of `tls` cannot be read.
    """

    def __init__(
        self, address: str = DEFAULT_ADDRESS, *, api_key: str | None = None, tls: Tls | None = None
    ) -> None:
        self.address = address
        self._metadata = key_metadata(api_key, address, tls)
        self._channel = open_channel(address, tls)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)
        self._batches = batches_pb2_grpc.BatchesStub(self._channel)

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Any
    ) -> Call[pb.GenerateResponse]:
        """Sends a request and returns its stream of output. It is sent before this returns.

        Args:
            prompt: text, or token ids.
            timeout: seconds until the call is cancelled.
            options: as in `make_request`.
        """
        message = make_request(prompt, **options)
        call = self._stub.Generate(message, timeout=timeout, metadata=self._metadata)
        return Call(call, self.address)

    def complete(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Any
    ) -> list[Completion]:
        """Waits for all n continuations and returns them by index. Arguments as in `generate`."""
        completions: dict[int, Completion] = {}
        for message in self.generate(prompt, timeout=timeout, **options):
            entry = completions.setdefault(message.index, Completion(message.index))
            entry.text += message.text
            entry.token_ids.extend(message.token_ids)
            entry.logprobs.extend(message.logprobs)
            entry.prompt_logprobs.extend(message.prompt_logprobs)
            if message.HasField("finish"):
                entry.finish(message.finish)
        return [completions[index] for index in sorted(completions)]

    def embed(
        self,
        inputs: str | Sequence[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> list[Embedding]:
        """Waits for a vector of each input, and returns them in order.

        Args:
            inputs: a text, or several texts or lists of token ids.
            timeout: seconds until the call is cancelled.
            options: as in `make_embed_request`.
        """
        message = make_embed_request(inputs, **options)
        call = self._stub.Embed(message, timeout=timeout, metadata=self._metadata)
        return [
            Embedding.from_message(embedding)
            for response in Call[pb.EmbedResponse](call, self.address)
            for embedding in response.embeddings
        ]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> pb.ScoreResponse:
        """How well queries and documents match: a score for each pair, in order.

        Args:
            queries: one, or as many as documents.
            documents: one or several.
            timeout: seconds until the call is cancelled.
            options: as in `make_score_request`.
        """
        message = make_score_request(queries, documents, **options)
        response: pb.ScoreResponse = self._answer(self._stub.Score, message, timeout)
        return response

    def info(self, *, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """What the server serves: model, limits, policy, pool, device. timeout: seconds."""
        return self._answer(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)

    def submit_batch(
        self,
        batch_id: str,
        lines: Sequence[batches_pb2.BatchLine],
        *,
        first_line: int = 0,
        commit: bool = True,
    ) -> batches_pb2.BatchStatus:
        """Adds lines to a batch, which is created if it is not there. A call that got no response
        can be repeated unchanged.

        Args:
            batch_id: any id; empty lets the server choose one.
            lines: messages from `make_line`.
            first_line: number of the first of these lines in the batch, from 0.
            commit: whether the batch is complete. It is served from then on and takes no more
                lines.
        """
        message = batches_pb2.SubmitBatchRequest(
            batch_id=batch_id, first_line=first_line, lines=lines, commit=commit
        )
        return self._answer(self._batches.SubmitBatch, message, _BATCH_CALL_S).status

    def get_batch(
        self,
        batch_id: str,
        *,
        first_line: int = 0,
        follow: bool = True,
        timeout: float | None = None,
    ) -> Call[batches_pb2.GetBatchResponse]:
        """Status of a batch, and its results in the order of lines.

        Args:
            batch_id: the batch's id.
            first_line: number of the first line to get a result of.
            follow: whether to wait for results until the batch is over; otherwise only those that
                exist.
            timeout: seconds until the call is cancelled.
        """
        message = batches_pb2.GetBatchRequest(
            batch_id=batch_id, first_line=first_line, follow=follow
        )
        call = self._batches.GetBatch(message, timeout=timeout, metadata=self._metadata)
        return Call(call, self.address)

    def batch_status(self, batch_id: str) -> batches_pb2.BatchStatus:
        """Status of a batch, without results."""
        end = 2**31 - 1
        call = self.get_batch(batch_id, first_line=end, follow=False, timeout=_BATCH_CALL_S)
        return next(call).status

    def cancel_batch(self, batch_id: str) -> batches_pb2.BatchStatus:
        """Cancels a batch. Lines without a result never get one."""
        message = batches_pb2.CancelBatchRequest(batch_id=batch_id)
        return self._answer(self._batches.CancelBatch, message, _BATCH_CALL_S).status

    def delete_batch(self, batch_id: str) -> None:
        """Deletes a batch that is over, with its results."""
        message = batches_pb2.DeleteBatchRequest(batch_id=batch_id)
        self._answer(self._batches.DeleteBatch, message, _BATCH_CALL_S)

    def _answer(self, method: Any, message: Any, timeout: float | None) -> Any:
        try:
            return method(message, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise explained(error, self.address) from None

    def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
