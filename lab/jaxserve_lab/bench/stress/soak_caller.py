"""A client of `bench soak`, and its requests."""

from __future__ import annotations

import http
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxserve_lab.bench.stress import soak_frontends
from jaxserve_lab.bench.stress.http_calls import call
from jaxserve_lab.bench.stress.ledger import Ledger

MAX_PROMPT, MAX_OUTPUT = 240, 160
KNOWN_OUTPUT = 96
_KNOWN = 6
_LEARN_S = 120.0  # per call, on an idle server


@dataclass
class Caller:
    """A client thread, and what it knows of the model.

    Attributes:
        rng: Draws its calls.
        grpc, http: Clients of the two frontends.
        ledger: Notes calls.
        vocab_size: The model's; 0 until learnt.
        known: Greedy texts of KNOWN_OUTPUT tokens, by prompt, from an idle server.
        doing: The kind of its current call.
    """

    rng: random.Random
    grpc: soak_frontends.GrpcDoor
    http: soak_frontends.HttpDoor
    ledger: Ledger
    vocab_size: int = 0
    known: dict[tuple[int, ...], str] = field(default_factory=dict)
    doing: str = ""

    def learn(self) -> None:
        """Asks the server for vocab_size and the known texts. Raises Refused, ServerError."""
        self.vocab_size = self.grpc.client.info(timeout=_LEARN_S).vocab_size
        self.ledger.note("questions", "GetServerInfo", "ok")
        for _ in range(_KNOWN):
            asked = self.asked()
            asked.max_tokens, asked.sampling = KNOWN_OUTPUT, {"ignore_eos": True}
            asked.slo, asked.slo_class, asked.tier = {}, "", None
            stream = self.grpc.stream(asked, timeout_s=_LEARN_S)
            self.known[tuple(asked.prompt)] = "".join(stream.texts())
            stream.leave(vanish=False)
            self.ledger.note("whole", self.grpc.method, "ok")

    def texts(self, stream: soak_frontends.Stream, asked: soak_frontends.Asked) -> Iterator[str]:
        """Passes on a stream's pieces, and notes how long each takes. Raises Refused."""
        pieces = stream.texts()
        while True:
            began = time.monotonic()
            try:
                piece = next(pieces, None)
            finally:
                self.ledger.waited(asked.tier_served, time.monotonic() - began)
            if piece is None:
                return
            yield piece

    def door(self) -> soak_frontends.Door:
        """A random frontend."""
        return self.rng.choice((self.grpc, self.http))

    def asked(self, shortest: int = 1, longest: int = MAX_OUTPUT) -> soak_frontends.Asked:
        """A random request."""
        rng = self.rng
        length = rng.randint(1, MAX_PROMPT)
        asked = soak_frontends.Asked(
            [rng.randrange(4, self.vocab_size) for _ in range(length)],
            rng.randint(shortest, longest),
            {"ignore_eos": rng.random() < 0.7},
            tier=rng.choice((None, "realtime", "best_effort")),
        )
        match rng.randrange(4):
            case 0:
                asked.slo = {"ttft_ms": rng.uniform(50, 5000), "tbt_ms": rng.uniform(20, 500)}
            case 1:
                asked.slo = {"jct_ms": rng.uniform(500, 20_000)}
            case 2:
                asked.slo_class = rng.choice(("interactive", "standard", "offline"))
        if rng.random() < 0.3:
            asked.sampling |= {"temperature": 1.0, "top_p": 0.9, "seed": rng.randrange(1000)}
        if rng.random() < 0.1:
            asked.sampling |= {"n": 2, "repetition_penalty": 1.1, "stop": ["."]}
        return asked


def whole_http(
    caller: Caller, kind: str, path: str, body: Any = None, *, method: str = "", **options: Any
) -> dict[str, Any]:
    """Makes an HTTP call and notes how it ended.

    Args:
        caller: The calling client.
        kind: Kind of the call, for the ledger.
        path, body, method, options: As for `http_calls.call`.

    Returns:
        The JSON object of the answer.

    Raises:
        Refused: The status is not 200.
    """
    arguments = {"method": method, "patience_s": None, **options}
    status, answer = call(caller.http.address, path, body, **arguments)
    label = "http " + "/".join(path.split("/")[:3])
    ended = "ok" if status == http.HTTPStatus.OK else soak_frontends.error_code(status, answer)
    caller.ledger.note(kind, label, ended)
    if ended != "ok":
        raise soak_frontends.Refused(ended)
    body_object: dict[str, Any] = json.loads(answer)
    return body_object
