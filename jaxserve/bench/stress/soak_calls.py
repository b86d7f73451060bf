"""The kinds of calls of `bench soak`: each makes one, or a few that belong together, and notes how
they ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping

from jaxserve.bench.stress import attacks
from jaxserve.bench.stress.server_process import WRITE_TIMEOUT_S
from jaxserve.bench.stress.soak_batches import grpc_batch, http_batch
from jaxserve.bench.stress.soak_caller import KNOWN_OUTPUT, MAX_OUTPUT, Caller, whole_http
from jaxserve.bench.stress.soak_frontends import (
    COMPLETIONS,
    Asked,
    Door,
    Refused,
    completion,
    error_code,
)

_OVERLOADED = {"RESOURCE_EXHAUSTED", "queue_full", "too_many_calls", "expected_late"}


def whole(caller: Caller) -> None:
    """All of a stream is read; where the text is known, it is that."""
    asked, text = caller.asked(), None
    if caller.rng.random() < 0.5:
        prompt = caller.rng.choice(list(caller.known))
        text = caller.known[prompt]
        asked.prompt, asked.max_tokens = list(prompt), caller.rng.randint(1, KNOWN_OUTPUT)
        asked.sampling = {"ignore_eos": True}
    _read(caller, "whole", caller.door(), asked, text)


def scored(caller: Caller) -> None:
    """How likely a prompt is, and nothing new."""
    asked, ended = caller.asked(), "ok"
    asked.max_tokens, asked.sampling = 0, {"echo": True, "logprobs": caller.rng.randint(0, 20)}
    try:
        body = json.dumps(completion(asked)).encode()
        found = whole_http(caller, "scored", "POST", COMPLETIONS, body)
        told = found["choices"][0]["logprobs"]["token_logprobs"]
        if len(told) != len(asked.prompt) or None in told[1:]:
            caller.ledger.problem(f"scored: {len(told)} of {len(asked.prompt)} tokens were told")
    except Refused as error:
        ended = error.status
    if ended not in {"ok", *_OVERLOADED}:
        caller.ledger.problem(f"scored: a good call ended with {ended}")


def slow(caller: Caller) -> None:
    """It is read, but with pauses."""
    pauses = caller.rng.uniform(0.01, 0.1)
    _read(caller, "slow reader", caller.door(), caller.asked(), None, pauses)


def cancelled(caller: Caller) -> None:
    """It is cancelled after a while, politely or not."""
    vanish = caller.rng.random() < 0.5
    kind, door = "disconnected" if vanish else "cancelled", caller.door()
    asked = caller.asked(shortest=20)
    stream = door.stream(asked)
    some, ended = caller.rng.randint(1, 10), "ok"
    try:
        for number, _ in enumerate(caller.texts(stream, asked)):
            if number == some:
                ended = "left"
                break
    except Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=vanish)
    _note_read(caller, kind, door, ended)


def late(caller: Caller) -> None:
    """A deadline that may pass; only gRPC has them."""
    asked = caller.asked(shortest=100)
    stream = caller.grpc.stream(asked, timeout_s=caller.rng.uniform(0.2, 2.0))
    heard, ended = False, "ok"
    try:
        for _ in caller.texts(stream, asked):
            heard = True
    except Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=False)
    surely = heard or ended != "DEADLINE_EXCEEDED"
    caller.ledger.note("deadline", caller.grpc.method, ended, surely=surely)


def unread(caller: Caller) -> None:
    """Nobody reads it for longer than the server waits."""
    if caller.rng.random() < 0.5:
        crowd = attacks.Unread(caller.grpc.client.address, streams=1, tokens=MAX_OUTPUT)
        time.sleep(WRITE_TIMEOUT_S + 1)
        for code, count in crowd.read().codes.items():
            for _ in range(count):
                caller.ledger.note("unread", caller.grpc.method, _plain(code))
        crowd.vanish()
        return
    asked = Asked([5, 6, 7], MAX_OUTPUT, {"ignore_eos": True, "logprobs": 20, "n": 4})
    stream = caller.http.stream(asked)
    texts = stream.texts()
    try:
        next(texts)
        ended = "unread"
        time.sleep(WRITE_TIMEOUT_S + 1)
    except Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=True)
    caller.ledger.note("unread", caller.http.method, ended)


def wrong(caller: Caller) -> None:
    """What is no request, or none that can be served."""
    rng, door = caller.rng, caller.door()
    if door is caller.grpc and rng.random() < 0.5:
        ended = asyncio.run(attacks.told(caller.grpc.client.address, attacks.no_message(rng)))
    elif rng.random() < 0.3:
        asked = Asked([5] * 5000, 1)
        ended = _ended(door, asked)
    elif rng.random() < 0.5:
        ended = _ended(door, Asked([5], 1, {"temperature": -1.0}))
    else:
        door, body = caller.http, rng.choice((b"{", b"[]", b'{"prompt": "a", "no_such": 1}', b""))
        ended = error_code(*caller.http.call("POST", COMPLETIONS, body))
    if ended == "ok":
        caller.ledger.problem("wrong: a call was served that is none")
    caller.ledger.note("wrong", door.method, ended)


def half(caller: Caller) -> None:
    """The client goes before it has sent all of its request."""
    body = json.dumps(completion(caller.asked())).encode()
    with contextlib.closing(caller.http.connect()) as connection:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[: len(body) // 2])
        # Only what the server has taken up is surely counted; there is no way to know.
    caller.ledger.note("half", caller.http.method, "half", surely=False)


def twice(caller: Caller) -> None:
    """The same request_id while it runs."""
    name, door = uuid.uuid4().hex, caller.door()
    first = caller.asked(shortest=40)
    first.request_id = name
    stream, ended = door.stream(first), "ok"
    try:
        for number, _ in enumerate(caller.texts(stream, first)):
            if number == 0:
                other = caller.door()
                again = _ended(other, Asked([5, 6], 1, request_id=name))
                caller.ledger.note("same id", other.method, again)
    except Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=False)
    _note_read(caller, "same id", door, ended)


def asked_about(caller: Caller) -> None:
    """What is served, and tokens."""
    caller.grpc.client.info()
    caller.ledger.note("questions", "GetServerInfo", "ok")
    for method, path, body in (
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", b'{"prompt": "Once upon a time"}'),
        ("POST", "/detokenize", b'{"tokens": [5, 6, 7]}'),
    ):
        whole_http(caller, "questions", method, path, body)


KINDS: Mapping[Callable[[Caller], None], float] = {
    whole: 0.3,
    scored: 0.04,
    slow: 0.08,
    cancelled: 0.2,
    late: 0.1,
    unread: 0.02,
    wrong: 0.1,
    half: 0.04,
    twice: 0.04,
    asked_about: 0.04,
    grpc_batch: 0.02,
    http_batch: 0.02,
}
"""How often each is made."""


def _read(
    caller: Caller,
    kind: str,
    door: Door,
    asked: Asked,
    text: str | None,
    pauses_s: float = 0.0,
) -> None:
    stream, pieces, ended = door.stream(asked), [], "ok"
    try:
        for piece in caller.texts(stream, asked):
            pieces.append(piece)
            time.sleep(pauses_s)
    except Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=False)
    if ended == "ok" and text is not None and not text.startswith("".join(pieces)):
        caller.ledger.problem(f"{kind}: a greedy text is not what it was")
    _note_read(caller, kind, door, ended)


def _note_read(caller: Caller, kind: str, door: Door, ended: str) -> None:
    """Those that were well asked are served, left, or too many."""
    if ended not in {"ok", "left", *_OVERLOADED}:
        caller.ledger.problem(f"{kind}: {door.name} ended a good call with {ended}")
    caller.ledger.note(kind, door.method, ended)


def _ended(door: Door, asked: Asked) -> str:
    stream = door.stream(asked)
    try:
        for _ in stream.texts():
            pass
        return "ok"
    except Refused as error:
        return error.status
    finally:
        stream.leave(vanish=False)


def _plain(code: str) -> str:
    return {"OK": "ok", "cut short": "left"}.get(code, code)
