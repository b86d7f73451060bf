"""Streams of OpenAI's client, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import openai

PROMPT = "Once upon a time"
TIMEOUT_S = 300.0


@dataclass
class Stream:
    """What a client got.

    Attributes:
        text: All that came.
        ttft: Seconds until the first piece.
        error: The error that cut it off, with its code; "" if it is whole.
        pieces: Number of chunks.
    """

    text: str = ""
    ttft: float | None = None
    error: str = ""
    pieces: int = 0

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
) -> Stream:
    """Streams one greedy completion of PROMPT.

    Args:
        api: The client.
        model: Name of the model.
        max_tokens: Of the completion.
        on_first: Called when the first piece arrives.
    """
    found, began = Stream(), time.monotonic()
    try:
        chunks = await api.completions.create(
            model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0, stream=True
        )
        async for chunk in chunks:
            if not found.pieces:
                found.ttft = time.monotonic() - began
                on_first()
            found.pieces += 1
            found.text += chunk.choices[0].text
    except openai.APIError as error:
        found.error = f"{getattr(error, 'code', None) or type(error).__name__}: {error}"
    return found


async def many(
    api: openai.AsyncOpenAI,
    model: str,
    max_tokens: int,
    count: int,
    when: int,
    then: Callable[[], None],
) -> list[Stream]:
    """Streams many completions at once.

    Args:
        api, model, max_tokens: As in `stream`.
        count: Number of streams.
        when: How many streams must have begun for `then`.
        then: Called once, as soon as they have.
    """
    begun = 0

    def on_first() -> None:
        nonlocal begun
        begun += 1
        if begun == when:
            then()

    streams = (stream(api, model, max_tokens, on_first) for _ in range(count))
    return list(await asyncio.gather(*streams))


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
