"""The kinds of calls of `bench soak`: each function makes a call, or a few that belong together,
and notes how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from jaxserve_lab.bench.stress import attacks, soak_frontends
from jaxserve_lab.bench.stress.http_calls import COMPLETIONS, call
from jaxserve_lab.bench.stress.server_process import WRITE_TIMEOUT_S
from jaxserve_lab.bench.stress.soak_batches import grpc_batch, http_batch
from jaxserve_lab.bench.stress.soak_caller import KNOWN_OUTPUT, MAX_OUTPUT, Caller, whole_http

_OVERLOADED = {"RESOURCE_EXHAUSTED", "queue_full", "too_many_calls", "expected_late"}


def whole(caller: Caller) -> None:
    """Reads all of a stream, and compares its text if it is known."""
    asked, text = caller.asked(), None
    if caller.rng.random() < 0.5:
        prompt = caller.rng.choice(list(caller.known))
        text = caller.known[prompt]
        asked.prompt, asked.max_tokens = list(prompt), caller.rng.randint(1, KNOWN_OUTPUT)
        asked.sampling = {"ignore_eos": True}
    _read(caller, "whole", caller.door(), asked, text)


def scored(caller: Caller) -> None:
    """Asks for a prompt's log-probabilities and no new tokens."""
    asked, ended = caller.asked(), "ok"
    asked.max_tokens, asked.sampling = 0, {"echo": True, "logprobs": caller.rng.randint(0, 20)}
    try:
        answer = whole_http(caller, "scored", COMPLETIONS, soak_frontends.completion(asked))
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        if len(logprobs) != len(asked.prompt) or None in logprobs[1:]:
            caller.ledger.problem(
                f"scored: {len(logprobs)} of {len(asked.prompt)} tokens were told"
            )
    except soak_frontends.Refused as error:
        ended = error.status
    if ended not in {"ok", *_OVERLOADED}:
        caller.ledger.problem(f"scored: a good call ended with {ended}")


def conversation(caller: Caller) -> None:
    """Makes a few calls, each extending the previous prompt, with its own cache salt: no prefix of
    others is found, and the last answer is the same as without the cache."""
    asked, salt, ended = caller.asked(shortest=8, longest=24), uuid.uuid4().hex, "ok"
    asked.sampling, texts = {"ignore_eos": True}, list[str]()
    try:
        for turn, cache_salt in enumerate((salt, salt, salt, uuid.uuid4().hex)):
            body = soak_frontends.completion(asked, cache_salt=cache_salt)
            answer = whole_http(caller, "conversation", COMPLETIONS, body)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            if cached and (cache_salt != salt or not turn):
                caller.ledger.problem(f"conversation: {cached} tokens of others' were found")
            texts.append(answer["choices"][0]["text"])
            if turn < 2:  # the third and the fourth are equal
                asked.prompt = asked.prompt + asked.prompt[:8]
        if texts[2] != texts[3]:
            caller.ledger.problem("conversation: a text is not what it is where nothing is found")
    except soak_frontends.Refused as error:
        ended = error.status
    if ended not in {"ok", *_OVERLOADED}:
        caller.ledger.problem(f"conversation: a good call ended with {ended}")


def slow(caller: Caller) -> None:
    """Reads a stream with pauses."""
    pauses = caller.rng.uniform(0.01, 0.1)
    _read(caller, "slow reader", caller.door(), caller.asked(), None, pauses)


def cancelled(caller: Caller) -> None:
    """Cancels a stream after a while, or closes its connection."""
    vanish = caller.rng.random() < 0.5
    kind, door = "disconnected" if vanish else "cancelled", caller.door()
    asked = caller.asked(shortest=20)
    stream, pieces = door.stream(asked), caller.rng.randint(1, 10)
    texts = caller.texts(stream, asked)
    ended = _followed(stream, texts, lambda number, _: number == pieces, vanish=vanish)
    _note_read(caller, kind, door, ended)


def late(caller: Caller) -> None:
    """Makes a call with a deadline that may pass; only gRPC has them."""
    asked = caller.asked(shortest=100)
    stream = caller.grpc.stream(asked, timeout_s=caller.rng.uniform(0.2, 2.0))
    heard: list[str] = []
    ended = _followed(stream, caller.texts(stream, asked), lambda _, text: heard.append(text))
    surely = bool(heard) or ended != "DEADLINE_EXCEEDED"
    caller.ledger.note("deadline", caller.grpc.method, ended, surely=surely)


def unread(caller: Caller) -> None:
    """Leaves a stream unread for longer than the server waits."""
    if caller.rng.random() < 0.5:
        crowd = attacks.Unread(caller.grpc.client.address, streams=1, tokens=MAX_OUTPUT)
        time.sleep(WRITE_TIMEOUT_S + 1)
        for code, count in crowd.read().codes.items():
            for _ in range(count):
                caller.ledger.note("unread", caller.grpc.method, _plain(code))
        crowd.vanish()
        return
    asked = soak_frontends.Asked(
        [5, 6, 7], MAX_OUTPUT, {"ignore_eos": True, "logprobs": 20, "n": 4}
    )
    stream = caller.http.stream(asked)
    texts = stream.texts()
    try:
        next(texts)
        ended = "unread"
        time.sleep(WRITE_TIMEOUT_S + 1)
    except soak_frontends.Refused as error:
        ended = error.status
    finally:
        stream.leave(vanish=True)
    caller.ledger.note("unread", caller.http.method, ended)


def wrong(caller: Caller) -> None:
    """Sends a malformed request, or one that cannot be served."""
    rng, door = caller.rng, caller.door()
    if door is caller.grpc and rng.random() < 0.5:
        ended = asyncio.run(attacks.told(caller.grpc.client.address, attacks.no_message(rng)))
    elif rng.random() < 0.3:
        asked = soak_frontends.Asked([5] * 5000, 1)
        ended = _ended(door, asked)
    elif rng.random() < 0.5:
        ended = _ended(door, soak_frontends.Asked([5], 1, {"temperature": -1.0}))
    else:
        door, body = caller.http, rng.choice((b"{", b"[]", b'{"prompt": "a", "no_such": 1}', b""))
        ended = soak_frontends.error_code(
            *call(caller.http.address, COMPLETIONS, body, patience_s=None)
        )
    if ended == "ok":
        caller.ledger.problem("wrong: a call was served that is none")
    caller.ledger.note("wrong", door.method, ended)


def half(caller: Caller) -> None:
    """Closes the connection before all of a request is sent."""
    body = json.dumps(soak_frontends.completion(caller.asked())).encode()
    with contextlib.closing(caller.http.connect()) as connection:
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[: len(body) // 2])
        # Calls are only counted if the server took them up, which is unknown here.
    caller.ledger.note("half", caller.http.method, "half", surely=False)


def twice(caller: Caller) -> None:
    """Reuses a running request's request_id."""
    name, door = uuid.uuid4().hex, caller.door()
    first = caller.asked(shortest=40)
    first.request_id = name

    def again(number: int, _: str) -> None:
        if number == 0:
            other = caller.door()
            ended = _ended(other, soak_frontends.Asked([5, 6], 1, request_id=name))
            caller.ledger.note("same id", other.method, ended)

    stream = door.stream(first)
    ended = _followed(stream, caller.texts(stream, first), again)
    _note_read(caller, "same id", door, ended)


def asked_about(caller: Caller) -> None:
    """Asks for the model, tokenizes a text and detokenizes tokens."""
    caller.grpc.client.info()
    caller.ledger.note("questions", "GetServerInfo", "ok")
    for path, body in (
        ("/v1/models", None),
        ("/tokenize", {"prompt": "Once upon a time"}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ):
        whole_http(caller, "questions", path, body)


KINDS: Mapping[Callable[[Caller], None], float] = {
    whole: 0.24,
    conversation: 0.06,
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
"""Relative frequencies of the calls."""


def _read(
    caller: Caller,
    kind: str,
    door: soak_frontends.Door,
    asked: soak_frontends.Asked,
    text: str | None,
    pauses_s: float = 0.0,
) -> None:
    stream, pieces = door.stream(asked), []

    def read(_: int, piece: str) -> None:
        pieces.append(piece)
        time.sleep(pauses_s)

    ended = _followed(stream, caller.texts(stream, asked), read)
    if ended == "ok" and text is not None and not text.startswith("".join(pieces)):
        caller.ledger.problem(f"{kind}: a greedy text is not what it was")
    _note_read(caller, kind, door, ended)


def _note_read(caller: Caller, kind: str, door: soak_frontends.Door, ended: str) -> None:
    """Good calls are served, left, or too many."""
    if ended not in {"ok", "left", *_OVERLOADED}:
        caller.ledger.problem(f"{kind}: {door.name} ended a good call with {ended}")
    caller.ledger.note(kind, door.method, ended)


def _ended(door: soak_frontends.Door, asked: soak_frontends.Asked) -> str:
    stream = door.stream(asked)
    return _followed(stream, stream.texts(), lambda *_: None)


def _followed(
    stream: soak_frontends.Stream,
    texts: Iterator[str],
    enough: Callable[[int, str], bool | None],
    *,
    vanish: bool = False,
) -> str:
    """How a call ended, in `Ledger`'s terms: left if it was enough to read the piece with this
    number."""
    try:
        for number, text in enumerate(texts):
            if enough(number, text):
                return "left"
        return "ok"
    except soak_frontends.Refused as error:
        return error.status
    finally:
        stream.leave(vanish=vanish)


def _plain(code: str) -> str:
    return {"OK": "ok", "cut short": "left"}.get(code, code)
