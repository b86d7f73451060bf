"""Readers and talkers, who ask two replicas one after the other.

Readers have long prompts, short answers and no hurry between tokens; talkers have short prompts,
long answers and a tight TBT. So those that move should be talkers, away from where readers are.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
import openai

from jaxserve.deploy.local.cluster import Cluster
from jaxserve_lab.experiments.scale_live.streams import MODEL, client

RATE = 3.0  # of them come in a second
READERS = 0.5  # share of the requests
READ, SAID = 460, 32  # tokens of a reader's prompt and answer
SHORT, TALKED = 24, 64  # of a talker's
TTFT, TBT = 2.0, 0.008  # seconds; the latter of talkers


@dataclass(frozen=True)
class Asked:
    """Requests to come, [requests].

    Attributes:
        arrival: When, in seconds.
        reads: Whether it is a reader's.
    """

    arrival: np.ndarray
    reads: np.ndarray

    @classmethod
    def draw(cls, count: int) -> Asked:
        """As many requests, the same each time."""
        drawn = np.random.default_rng(0)
        arrival = np.cumsum(drawn.exponential(1 / RATE, count))
        return cls(arrival, drawn.random(count) < READERS)


@dataclass
class Served:
    """A request that was served.

    Attributes:
        text: All that came.
        moved: How often it went on at another replica.
        cached: Tokens that were found cached, where it ended.
        error: What cut it off; "" if it is whole.
        times: When its pieces came, in seconds since it was sent.
    """

    text: str = ""
    moved: int = 0
    cached: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """The longest time between two pieces, in seconds."""
        return float(max(np.diff(self.times), default=0.0))


async def serve(cluster: Cluster, asked: Asked) -> list[Served]:
    """Streams all of them, each when it comes, with targets."""
    drawn, count = np.random.default_rng(1), len(asked.arrival)
    lengths = np.where(asked.reads, READ, SHORT).tolist()
    prompts = [drawn.integers(10, 400, length).tolist() for length in lengths]
    began = time.monotonic()
    async with client(cluster.http) as api:

        async def ask(number: int) -> Served:
            await asyncio.sleep(began + asked.arrival[number] - time.monotonic())
            return await _ask(api, prompts[number], reads=bool(asked.reads[number]))

        return list(await asyncio.gather(*map(ask, range(count))))


async def _ask(api: openai.AsyncOpenAI, prompt: list[int], *, reads: bool) -> Served:
    slo = {"ttft_ms": 1000 * TTFT} | ({} if reads else {"tbt_ms": 1000 * TBT})
    began, found = time.monotonic(), Served()
    try:
        chunks = await api.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=SAID if reads else TALKED,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"slo": slo, "ignore_eos": True, "serve_late": True},
        )
        async for chunk in chunks:
            if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                found.cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
            for choice in chunk.choices:
                found.times.append(time.monotonic() - began)
                found.text += choice.text
                found.moved = (choice.model_extra or {}).get("moved", 0)
    except openai.APIError as error:
        found.error = f"{getattr(error, 'code', None) or type(error).__name__}: {error}"
    return found
