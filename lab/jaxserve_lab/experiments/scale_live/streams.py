"""Streams of OpenAI's client and of gRPC, and how they end."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import openai
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.client import make_request
from jaxserve.deploy.local.cluster import READY_S, Cluster
from jaxserve.server.proto import generation_pb2_grpc

MODEL = "tiny-stories"
PROMPT = "Once upon a time"
LONG_PROMPT = 8 * "Once upon a time there was a little girl named Lily. "  # several blocks
TIMEOUT_S = 300.0


@dataclass
class Stream:
    """What a client got.

    Attributes:
        text: All that came.
        ttft: Seconds until the first piece.
        error: The error that cut it off, with its code; "" if it is whole.
        pieces: Number of chunks.
        gap: Longest time between two chunks, in seconds.
        moved: How often it went on at another replica.
        seconds: How long it took.
        began: When it was asked for, in seconds of time.monotonic().
    """

    text: str = ""
    ttft: float | None = None
    error: str = ""
    pieces: int = 0
    gap: float = 0.0
    moved: int = 0
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    _last: float = 0.0

    def take(self, text: str, on_first: Callable[[], None]) -> None:
        """Takes the next piece."""
        now = time.monotonic()
        if self.pieces:
            self.gap = max(self.gap, now - self._last)
        else:
            self.ttft = now - self.began
            on_first()
        self._last, self.seconds = now, now - self.began
        self.pieces += 1
        self.text += text

    @property
    def outcome(self) -> str:
        """whole, cut (after some text) or failed (without any)."""
        return "whole" if not self.error else "cut" if self.pieces else "failed"


def client(http: str) -> openai.AsyncOpenAI:
    """A client that never retries."""
    return openai.AsyncOpenAI(base_url=http, api_key="none", timeout=TIMEOUT_S, max_retries=0)


async def stream(
    api: openai.AsyncOpenAI,
    model: str,
    max_tokens: int,
    on_first: Callable[[], None] = lambda: None,
    seed: int | None = None,
    prompt: str = PROMPT,
) -> Stream:
    """Streams one completion.

    Args:
        api: The client.
        model: Name of the model.
        max_tokens: Of the completion.
        on_first: Called when the first piece arrives.
        seed: Of its draws; None: it is greedy.
        prompt: What it completes.
    """
    found = Stream()
    try:
        chunks = await api.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0 if seed is None else 1,
            seed=seed,
            stream=True,
        )
        async for chunk in chunks:
            (choice,) = chunk.choices
            found.take(choice.text, on_first)
            found.moved = (choice.model_extra or {}).get("moved", 0)
    except openai.APIError as error:
        found.error = f"{getattr(error, 'code', None) or type(error).__name__}: {error}"
    return found


async def rpc(
    channel: grpc.aio.Channel,
    max_tokens: int,
    on_first: Callable[[], None] = lambda: None,
    seed: int | None = None,
    prompt: str = PROMPT,
) -> Stream:
    """The same over gRPC.

    Args:
        channel: To the server.
        max_tokens, on_first, seed, prompt: As in `stream`.
    """
    found = Stream()
    temperature = 0.0 if seed is None else 1.0
    message = make_request(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
    call = generation_pb2_grpc.GenerationStub(channel).Generate(message, timeout=TIMEOUT_S)
    try:
        async for answer in call:
            found.take(answer.text, on_first)
        found.moved = int(dict(await call.trailing_metadata()).get("x-jaxserve-moved", 0))
    except grpc.aio.AioRpcError as error:
        found.error = f"{error.code().name.lower()}: {error.details()}"
    return found


Ask = Callable[[Callable[[], None]], Awaitable[Stream]]


async def many(asks: Sequence[Ask], when: int, then: Callable[[], None]) -> list[Stream]:
    """Streams many completions at once.

    Args:
        asks: Begins each, given what to call when its first piece arrives.
        when: How many streams must have begun for `then`.
        then: Called once, as soon as they have.
    """
    begun = 0

    def on_first() -> None:
        nonlocal begun
        begun += 1
        if begun == when:
            then()

    return list(await asyncio.gather(*(ask(on_first) for ask in asks)))


async def until(
    api: openai.AsyncOpenAI,
    model: str,
    max_tokens: int,
    clients: int,
    over: Callable[[], bool],
    ended: list[Stream],
) -> None:
    """Keeps several clients busy, each with one stream after the other.

    Args:
        api, model, max_tokens: As in `stream`.
        clients: Number of clients.
        over: Whether to begin no more streams.
        ended: Each stream is appended when it ends.
    """

    async def one() -> None:
        while not over():
            ended.append(await stream(api, model, max_tokens))

    await asyncio.gather(*(one() for _ in range(clients)))


SEEDS = (None, 0, None, 1, 2)  # of the streams, one after the other; every fifth is over gRPC


async def mixed(
    cluster: Cluster,
    count: int,
    tokens: int,
    when: int = 0,
    then: Callable[[], None] = lambda: None,
    *,
    alike: bool = True,
    prompt: str = PROMPT,
) -> list[Stream]:
    """Streams over HTTP and gRPC at once, greedy ones and drawn ones.

    Args:
        cluster: Who answers.
        count: Number of streams.
        tokens: Of each.
        when, then: As in `many`.
        alike: Whether they have SEEDS in turn; otherwise each is drawn, with a seed of its own.
        prompt: Of all.
    """
    options = (("grpc.enable_http_proxy", 0),)
    async with (
        client(cluster.http) as api,
        grpc.aio.insecure_channel(cluster.grpc, options=options) as channel,
    ):

        def ask(number: int) -> Ask:
            seed = SEEDS[number % len(SEEDS)] if alike else number
            if number % len(SEEDS) == len(SEEDS) - 1:
                return lambda on_first: rpc(channel, tokens, on_first, seed, prompt)
            return lambda on_first: stream(api, MODEL, tokens, on_first, seed, prompt)

        return await many(list(map(ask, range(count))), when, then)


def wait_replaced(cluster: Cluster, victim: int, seconds: float = READY_S) -> None:
    """Waits until two replicas serve, another one instead of the one with this process id. Raises
    NotReady if that takes longer."""

    def replaced() -> bool:
        return len({*cluster.processes()} - {victim}) == 2 == cluster.replicas()

    cluster.wait(replaced, "another replica instead of the one that is lost", seconds)


def metric(cluster: Cluster, name: str, **labels: str) -> float:
    """The sum of a metric over the replicas, each of which says whose it is.

    Args:
        cluster: Where they are.
        name: Of the metric, without the product's.
        labels: Which samples count.
    """
    found = metrics(cluster, name, **labels)
    if not found:
        raise LookupError(f"no metric {name} with {labels}")
    return sum(found.values())


def metrics(cluster: Cluster, name: str, **labels: str) -> defaultdict[str, float]:
    """The same by replica.

    Args:
        cluster, name, labels: As in `metric`.
    """
    page = cluster.http.removesuffix("v1") + "metrics"
    with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:
        text = answer.read().decode()
    found = defaultdict[str, float](float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            replica = sample.labels.get("replica")
            if (
                sample.name == f"jaxserve:{name}"
                and replica
                and labels.items() <= sample.labels.items()
            ):
                found[replica] += sample.value
    return found
