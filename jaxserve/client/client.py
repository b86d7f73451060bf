"""`Client`: what a program says to a jaxserve server over gRPC, and gets back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc

DEFAULT_ADDRESS = "localhost:50051"
TIERS = {"realtime": pb.TIER_REALTIME, "best_effort": pb.TIER_BEST_EFFORT}
_SAMPLING = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)
_SLO = frozenset(pb.Slo.DESCRIPTOR.fields_by_name)


class ServerError(RuntimeError):
    """The server refused or ended a call. code: the gRPC status, as "INVALID_ARGUMENT"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Unreachable(ServerError):
    """No server answers at that address."""


@dataclass
class Completion:
    """One finished continuation.

    index: which of the n. token_ids: what was generated, a stop token included, of which the text
    has nothing. logprobs: one entry a token, if asked for. finish_reason: "stop" or "length".
    timings: milliseconds.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    usage: pb.Usage = field(default_factory=pb.Usage)
    timings: pb.Timings = field(default_factory=pb.Timings)


def make_request(
    prompt: str | Sequence[int],
    *,
    request_id: str = "",
    slo: Mapping[str, float] | None = None,
    tier: str = "realtime",
    **sampling: Any,
) -> pb.GenerateRequest:
    """The message for a prompt, as text or as token ids.

    slo: any of ttft_ms, tbt_ms, jct_ms. tier: "realtime" or "best_effort". sampling: fields of
    jaxserve.sched.request.SamplingParams; None leaves the server's default.
    Raises ValueError for a name that does not exist; limits are the server's to check.
    """
    if tier not in TIERS:
        raise ValueError(f"tier: unknown value {tier!r}; known values are {', '.join(TIERS)}")
    _known("sampling parameter", sampling, _SAMPLING)
    _known("slo", slo or {}, _SLO)
    message = pb.GenerateRequest(request_id=request_id, tier=TIERS[tier])
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.SetInParent()  # an empty list is sent as such, for the server to refuse
        message.token_ids.ids.extend(int(token) for token in prompt)
    for name, value in (slo or {}).items():
        _set(message.slo, name, value)
    for name, value in sampling.items():
        _set(message.sampling, name, value)
    return message


def _set(message: Message, name: str, value: Any) -> None:
    """Sets a field, adds to a repeated one; None leaves it. ValueError, naming the field, for what
    its protobuf type cannot hold."""
    try:
        if value is None:
            return
        if name == "logit_bias":
            message.logit_bias.update(value)
        elif name in ("stop", "stop_token_ids"):
            getattr(message, name).extend([value] if isinstance(value, str) else value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


class Generation(Iterator[pb.GenerateResponse]):
    """A running call, as an iterator over its messages. Dropping it cancels the call."""

    def __init__(self, call: Any, address: str) -> None:
        self._call = call
        self._address = address

    def __next__(self) -> pb.GenerateResponse:
        """Raises ServerError."""
        try:
            return next(self._call)
        except grpc.RpcError as error:
            raise _explained(error, self._address) from None

    def cancel(self) -> None:
        """Ends the call; nothing happens if it has ended."""
        self._call.cancel()

    def __del__(self) -> None:
        self.cancel()


class Client:
    """A connection to one server. Thread-safe: any number of calls may run at once.

    Every method raises ServerError (Unreachable if nobody answers).
    """

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self.address = address
        options = (("grpc.max_receive_message_length", -1),)  # a slow reader's merged messages
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Any
    ) -> Generation:
        """Sends the request now, and streams what is generated; `make_request` has the options.

        timeout: seconds until the call is given up.
        """
        call = self._stub.Generate(make_request(prompt, **options), timeout=timeout)
        return Generation(call, self.address)

    def complete(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Any
    ) -> list[Completion]:
        """Waits for the whole of each of the n continuations, in order of their index. Arguments as
        in `generate`."""
        completions: dict[int, Completion] = {}
        for message in self.generate(prompt, timeout=timeout, **options):
            entry = completions.setdefault(message.index, Completion(message.index))
            entry.text += message.text
            entry.token_ids.extend(message.token_ids)
            entry.logprobs.extend(message.logprobs)
            if message.HasField("finish"):
                name = pb.FinishReason.Name(message.finish.reason)
                entry.finish_reason = name.removeprefix("FINISH_REASON_").lower()
                entry.usage, entry.timings = message.finish.usage, message.finish.timings
        return [completions[index] for index in sorted(completions)]

    def info(self, *, timeout: float | None = None) -> pb.GetServerInfoResponse:
        """What the server serves: model, limits, policy, pool, device. timeout: seconds."""
        try:
            return self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise _explained(error, self.address) from None

    def close(self) -> None:
        """Closes the connection; calls that run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _explained(error: Any, address: str) -> ServerError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in details.lower():
        problem = f"no server answers at {address}: is it running? (make serve)"
        return Unreachable(code.name, problem)
    return ServerError(code.name, details or code.name.lower().replace("_", " "))


def _known(what: str, given: Mapping[str, Any], names: frozenset[str]) -> None:
    unknown = sorted(set(given) - names)
    if unknown:
        known = ", ".join(sorted(names))
        raise ValueError(f"unknown {what} {unknown[0]!r}; known ones are {known}")
