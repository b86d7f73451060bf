"""Attacks over gRPC, and the expected answers."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from jaxserve.client.connection import NO_PROXY
from jaxserve.client.messages import make_request
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.proto import generation_pb2_grpc
from jaxserve_lab.bench.stress.crowd import GENERATE, crowd

OVERLOAD, CHANNELS = 8_000, 4
UNREAD, UNREAD_TOKENS = 64, 400
MALFORMED = 1_164
MIB = 1 << 20
_PATIENCE_S = 60.0


@dataclass
class Tried:
    """The outcome of an attack, as the attackers saw it.

    Attributes:
        codes: Number of calls, by how they ended.
        longest_s: Seconds of the slowest refusal.
        problems: Requirements that did not hold.
        idle_s: Median time of another client's calls before; 0 if not measured.
        beside_s: The same, meanwhile.
        worst_s: The slowest of those.
    """

    codes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    idle_s: float = 0.0
    beside_s: float = 0.0
    worst_s: float = 0.0

    def expect(self, holds: bool, problem: str) -> None:
        """Adds the problem unless `holds`."""
        if not holds:
            self.problems.append(problem)


async def long_prompts(address: str) -> Tried:
    """Sends texts of 8 MiB and of slightly less than 1 MiB, and 200,000 token ids, four at a
    time."""
    messages = [make_request("x y " * (size // 4)) for size in (8 * MIB, MIB - 4096)]
    messages.append(make_request([5] * 200_000))
    tried = Tried()
    async with _channel(address) as channel:
        for message in messages:
            await _refused(channel, [message.SerializeToString()] * 4, tried)
    known = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    tried.expect(set(tried.codes) <= known, "a prompt that is too long was not refused as such")
    return tried


async def overload(address: str) -> Tried:
    """Makes thousands of calls at once, over a few connections. Accepted ones are cancelled at the
    end."""
    codes, hints, longest = await crowd(address, CHANNELS, OVERLOAD // CHANNELS)
    tried = Tried(codes, longest)
    tried.expect(set(codes) <= {"served", "RESOURCE_EXHAUSTED"}, "a refusal was not typed")
    tried.expect(hints == codes["RESOURCE_EXHAUSTED"] > 0, "a refusal had no retry hint")
    tried.expect(longest <= 1, "a refusal took more than 1 s")
    return tried


class Unread:
    """Streams with long answers that are not read.

    Args:
        address: Address of the gRPC server.
        streams: Number of streams; 0 for UNREAD.
        tokens: Tokens of each of a stream's 4 continuations.
    """

    def __init__(self, address: str, streams: int = 0, tokens: int = UNREAD_TOKENS) -> None:
        narrow = (NO_PROXY, ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
        self._channel = grpc.insecure_channel(address, options=narrow)
        stub = generation_pb2_grpc.GenerationStub(self._channel)
        message = make_request(
            "Once upon a time",
            max_tokens=tokens,
            ignore_eos=True,
            n=4,
            logprobs=20,
            temperature=1.0,
        )
        self.calls = [stub.Generate(message) for _ in range(streams or UNREAD)]

    def read(self) -> Tried:
        """Reads the available output."""
        tried = Tried()
        for call in self.calls:
            try:
                ended = sum(message.HasField("finish") for message in call)
                tried.codes["OK" if ended == 4 else "cut short"] += 1
            except grpc.RpcError as error:
                tried.codes[error.code().name] += 1
        return tried

    def vanish(self) -> None:
        """Closes the connection."""
        self._channel.close()


async def malformed(address: str) -> Tried:
    """Sends malformed messages: random, cut short, or with text that is not UTF-8."""
    seeded, tried = random.Random(0), Tried()
    bad = [b"\x12\x02\xff\xfe", b"\xff" * 9]
    bad += [no_message(seeded) for _ in range(MALFORMED - len(bad))]
    async with _channel(address) as channel:
        for begin in range(0, MALFORMED, 100):
            await _refused(channel, bad[begin : begin + 100], tried)
    tried.expect(set(tried.codes) == {"INVALID_ARGUMENT"}, "what is no message is something else")
    return tried


def no_message(seeded: random.Random) -> bytes:
    """A malformed message: random bytes, or the beginning of a message."""
    good = make_request("Once upon a time", max_tokens=4, stop=["a"]).SerializeToString()
    while True:
        message = seeded.choice(
            (seeded.randbytes(seeded.randint(1, 400)), good[: seeded.randrange(1, len(good))])
        )
        if not _parses(message):
            return message


async def extremes(address: str) -> Tried:
    """Sends tiny numbers, some of which float32 cannot hold."""
    tried, texts = Tried(), {}
    async with _channel(address) as channel:
        for name, value in (("top_p", 1e-30), ("top_p", 1e-38), ("top_p", 5e-324)):
            options: dict[str, Any] = {name: value, "temperature": 1.0, "seed": 1}
            texts[value] = await _text(channel, options, tried)
        penalty = {"repetition_penalty": 1e-46}
        tried.expect(await _text(channel, penalty, tried) is None, "a penalty of 1e-46 was served")
    tried.expect(len(set(texts.values())) == 1, "the smallest top_p is not the likeliest token")
    return tried


async def served(address: str, timeout_s: float = _PATIENCE_S) -> str:
    """The status code's name of an ordinary call."""
    tried = Tried()
    async with _channel(address) as channel:
        await _text(channel, {}, tried, timeout_s)
    return next(iter(tried.codes))


async def told(address: str, raw: bytes) -> str:
    """The status code's name of a call with these bytes."""
    tried = Tried()
    async with _channel(address) as channel:
        await _refused(channel, [raw], tried)
    return next(iter(tried.codes))


async def _text(
    channel: Any, options: dict[str, Any], tried: Tried, timeout_s: float = _PATIENCE_S
) -> str | None:
    message = make_request("Once upon a time", max_tokens=8, ignore_eos=True, **options)
    parts = []
    try:
        async for raw in _call(channel, message.SerializeToString(), timeout_s):
            parts.append(pb.GenerateResponse.FromString(raw).text)
    except grpc.aio.AioRpcError as error:
        tried.codes[error.code().name] += 1
        return None
    tried.codes["OK"] += 1
    return "".join(parts)


async def _refused(channel: Any, messages: Sequence[bytes], tried: Tried) -> None:
    async def one(raw: bytes) -> None:
        began = time.monotonic()
        try:
            async for _ in _call(channel, raw):
                pass
            tried.codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            tried.codes[error.code().name] += 1
        tried.longest_s = max(tried.longest_s, time.monotonic() - began)

    await asyncio.gather(*map(one, messages))


def _channel(address: str) -> Any:
    own = (NO_PROXY, ("grpc.use_local_subchannel_pool", 1))
    unlimited = (*own, ("grpc.max_send_message_length", -1))
    return grpc.aio.insecure_channel(address, options=unlimited)


def _call(channel: Any, raw: bytes, timeout_s: float = _PATIENCE_S) -> Any:
    return channel.unary_stream(GENERATE)(raw, timeout=timeout_s)


def _parses(message: bytes) -> bool:
    try:
        pb.GenerateRequest.FromString(message)
    except DecodeError:
        return False
    return True
