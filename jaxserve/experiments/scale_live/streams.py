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
    """One. text: what came. ttft: seconds until the first of it. error: what ended it before its
    end, with its code; "" for one that is whole."""

    text: str = ""
    ttft: float | None = None
    error: str = ""
    pieces: int = 0

    @property
    def outcome(self) -> str:
        """whole, cut (with what had come) or failed (with nothing)."""
        return "whole" if not self.error else "cut" if self.pieces else "failed"


def client(http: str) -> openai.AsyncOpenAI:
    """One that never asks again by itself."""
    return openai.AsyncOpenAI(base_url=http, api_key="none", timeout=TIMEOUT_S, max_retries=0)


async def stream(
    api: openai.AsyncOpenAI,
    model: str,
    max_tokens: int,
    on_first: Callable[[], None] = lambda: None,
) -> Stream:
    """One greedy completion of PROMPT."""
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
    """So many at once; then() is called, once, as soon as `when` of them have begun."""
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
    """Whole streams one after the other, of so many clients, until it is over; ended: gets each."""

    async def one() -> None:
        while not over():
            ended.append(await stream(api, model, max_tokens))

    await asyncio.gather(*(one() for _ in range(clients)))
