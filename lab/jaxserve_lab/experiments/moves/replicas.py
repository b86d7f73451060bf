"""Two replicas in this process, and a stream that goes from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.config import Config
from jaxserve.deploy.moves.relay import Pieces, Relay, ReplicaLost, Unserved
from jaxserve.deploy.moves.transport import Transport
from jaxserve.deploy.replica import EngineReplica
from jaxserve.deploy.replicas import NOTHING, Where
from jaxserve.deploy.response_kind import http_response_kind
from jaxserve.engine.engine import Engine
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.sched.request import Request
from jaxserve.server.moves.resume_point import Mark, ResumePoint
from jaxserve.server.startup.launch import find_checkpoint

PATH = "/v1/completions"
SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": PATH,
    "raw_path": PATH.encode(),
    "query_string": b"",
    "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    "client": ("127.0.0.1", 1),
}
SHAPE: dict[str, Any] = {  # of SmolLM2-135M
    "torch_dtype": "bfloat16",
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def shape_of_smollm2(folder: Path) -> Path:
    """Writes a checkpoint to the folder that has the shape of SmolLM2-135M, the tokenizer of the
    model in the box, and no weights. Returns the folder."""
    box = Path(jaxserve.__file__).parent / "assets" / "tiny-stories"
    for file in box.glob("tokenizer*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return folder


@dataclass
class Watch(Observer):
    """Says when what happens on the way from one replica to another.

    Attributes:
        times: By what has happened last, seconds of time.monotonic().
        steps: Those of the engine that an answer comes to.
    """

    times: dict[str, float] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    def note(self, what: str) -> None:
        """It happens now."""
        self.times[what] = time.monotonic()

    def on_arrival(self, number: int, request: Request) -> None:
        """See `Observer`."""
        self.note("arrived")

    def on_step(self, stats: StepStats) -> None:
        """See `Observer`."""
        self.steps.append(stats)


@dataclass
class Streamed:
    """What a client got.

    Attributes:
        times: When each piece came, seconds of time.monotonic().
        text: All of it.
        logprobs: Of each token.
    """

    times: list[float] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        """Seconds between its pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def take(self, body: bytes) -> None:
        """Takes the next piece of the stream."""
        self.times.append(time.monotonic())
        for line in body.decode().splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                self.text += choice["text"]
                self.logprobs += choice["logprobs"]["token_logprobs"]


class Pair:
    """Two replicas. Create it on the event loop that serves.

    Args:
        flags: Of both.
        transport: Between them.

    Attributes:
        engines: Their engines.
        watch: What happens between them.
    """

    def __init__(self, flags: Sequence[str], transport: Transport) -> None:
        self.engines: list[Engine] = []
        self.watch, self._secret = Watch(), os.urandom(32)
        self._replicas = [
            EngineReplica(flags, 1, self._run, functools.partial(str, name), transport=transport)
            for name in ("one", "other")
        ]
        self.engines[1].add_observer(self.watch)
        gc.collect()
        gc.freeze()  # as on Ray

    @contextlib.contextmanager
    def _run(self, config: Config) -> Iterator[Engine]:
        engine = build_engine(find_checkpoint(config), progress=False, block_secret=self._secret)
        self.engines.append(engine)
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()

    async def stop(self) -> None:
        """Stops both."""
        for replica in self._replicas:
            await replica.stop()

    async def fresh(self) -> None:
        """Nobody is served, and nothing is cached."""
        for engine in self.engines:
            while engine.stats().running or engine.stats().waiting:
                await asyncio.sleep(0.01)
            engine.reset_prefix_cache()

    async def stream(
        self,
        body: dict[str, Any],
        move: int = 0,
        leave: int = 0,
        lose: int = 0,
        *,
        resumable: bool = True,
    ) -> Streamed:
        """Streams an answer that begins at the first replica.

        Args:
            body: Of the call.
            move: Pieces after which it moves to the other, its cache ahead of it; 0 for never.
            leave: Pieces after which the first replica leaves it to the other; 0 for never.
            lose: Pieces after which the first replica is lost.
            resumable: Whether it could go on elsewhere.
        """
        said, replicas = json.dumps({**body, "stream": True}).encode(), iter(self._replicas)

        async def send(where: Where, point: ResumePoint, pages: Any) -> Pieces:
            self.watch.note("sent")
            replica, told = next(replicas), 0
            resume = await point.record() if resumable else b""
            answer = replica.http(SCOPE, said, resume, routing_request=NOTHING, pages=pages)
            try:
                async with aclosing(answer) as pieces:
                    async for piece in pieces:
                        yield piece
                        told += not all(isinstance(part, Mark) for part in piece)
                        if lose and told > lose and replica is self._replicas[0]:
                            raise ReplicaLost("it was killed", dead=True)
            except Unserved as error:
                raise ReplicaLost(error.reason, dead=True) from None

        found, leaving = Streamed(), None
        relay = Relay(send, http_response_kind, ResumePoint(arrived=time.time()))
        async with aclosing(relay.pieces()) as pieces:
            async for piece in pieces:
                if sse := b"".join(part.get("body", b"") for part in piece):
                    found.take(sse)
                if leaving is None and len(found.times) in {move, leave} - {0}:
                    self.watch.note("asked")
                    way = self._move(relay.point.key) if move else self._replicas[0].leave()
                    leaving = asyncio.create_task(way)
        if leaving is not None:
            await leaving
        return found

    async def _move(self, key: str) -> None:
        """As `Mover` does."""
        one, other = self._replicas
        handle = await one.offer(key)
        there = handle is not None and await other.bring(key, handle)
        self.watch.note("ahead")
        await one.hand_over(key, there)
