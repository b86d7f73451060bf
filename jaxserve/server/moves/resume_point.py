"""What travels of an answer that may go on at another replica, and what of it has been passed on.

A replica tells, after each part of an answer, which tokens the parts so far stand for (`Passed`).
Whoever passes the answer on puts these together (`ResumePoint`). Another replica is then sent the
same call with them: its engine goes on behind these tokens, and what its frontend makes of them is
left out, since the client has it. Whatever a call draws by chance comes from the point's key, so
that it is the same everywhere.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.server.moves.why import Why

MOST_VALUES = 1 << 19
"""Most tokens and log-probabilities of an answer that are kept for it to be resumed: some 10 MB."""
_AT_ONCE = 1 << 12  # of these, in a line of a record: the interpreter is held for a millisecond
_MOST_MOVES, _MOST_OUTPUTS = 1000, 1 << 11
KEY_BYTES = 16
"""Bytes of `ResumePoint.key`, and of what is drawn with it."""
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Top = tuple[int, float]


class Begun(NamedTuple):
    """The answer can be resumed. From here on it comes in pieces that end with `Passed`.

    Attributes:
        fingerprint: The system fingerprint of the replicas that can do so.
        replica: The name of the one that answers.
    """

    fingerprint: str
    replica: str = ""


class Passed(NamedTuple):
    """The parts since the last one stand for these further tokens of a continuation.

    Attributes:
        number: Continuation j of prompt i has the number i * n + j.
        tokens: The tokens.
        times: When each came, in seconds after the call's arrival.
        logprobs: As `Generated.logprobs`.
        given_up: Whether they say that its targets will be missed.
    """

    number: int
    tokens: tuple[int, ...]
    times: tuple[float, ...]
    logprobs: tuple[tuple[float, tuple[_Top, ...]], ...] = ()
    given_up: bool = False


class Handle(NamedTuple):
    """By which other replicas get what one has cached of an answer.

    Attributes:
        refs: Plain data, or what Ray can send. Whoever has no more use for the handle empties it,
            since its other holders keep it until the answer ends.
        keys: Keys of the pages (`Request.pages`), in order.
        num_bytes: Of all pages.
        source: Whence they come: whatever comes from there takes as long.
    """

    refs: list[Any]
    keys: tuple[bytes, ...]
    num_bytes: int
    source: str = ""


class Cache(NamedTuple):
    """The replica leaves the answer here. pages: what it has cached of the answer and others do not
    have yet; None for nothing."""

    pages: Handle | None


Mark = Begun | Passed | Cache


def unmarked(piece: Sequence[Any]) -> list[Any]:
    """The parts of a piece that are no marks."""
    return [part for part in piece if not isinstance(part, Mark)]


class Progress(BaseModel):
    """What was passed on of one continuation, as in `Passed`."""

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    number: int = Field(ge=0, lt=_MOST_OUTPUTS)
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(max_length=MOST_VALUES)
    times: list[_Seconds] = Field(max_length=MOST_VALUES)
    logprobs: list[tuple[float, list[_Top]]] = Field(max_length=MOST_VALUES)
    given_up: bool = False

    def add(self, more: Passed | Progress) -> None:
        """What was passed on after it."""
        self.tokens.extend(more.tokens)
        self.times.extend(more.times)
        self.logprobs.extend((logprob, list(top)) for logprob, top in more.logprobs)
        self.given_up |= more.given_up


def values(said: Passed | Progress) -> int:
    """How many of `MOST_VALUES` these are."""
    return len(said.tokens) + sum(1 + len(top) for _, top in said.logprobs)


class ResumePoint(BaseModel):
    """Where an answer is to be begun or resumed: what travels beside the call itself.

    Attributes:
        version: Of this record.
        key: Hexadecimal; the secret of whatever the call draws by chance.
        arrived: When the call came, in seconds of time.time(); it may then have waited for a
            replica.
        fingerprint: The system fingerprint of the replicas that can resume it.
        moved: When it moved, in seconds after the call's arrival.
        why: Why it moved last.
        messages: Number of ASGI messages with a part of the body that were passed on.
        outputs: What was passed on; empty for an answer that begins.
    """

    model_config = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    version: Literal[1] = 1
    key: str = Field(
        default_factory=lambda: secrets.token_hex(KEY_BYTES), pattern="^([0-9a-f]{2}){16}$"
    )
    arrived: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    fingerprint: Annotated[str, Field(max_length=100)] = ""
    moved: Annotated[list[_Seconds], Field(max_length=_MOST_MOVES)] = []
    why: Why = ""
    messages: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    outputs: Annotated[list[Progress], Field(max_length=_MOST_OUTPUTS)] = []

    async def record(self) -> bytes:
        """What travels, for `read`: a line of JSON, and further ones with what is said of its
        outputs if that is much. Then it is made on a thread, which others need not wait for."""
        if sum(map(values, self.outputs)) <= _AT_ONCE:
            return self.model_dump_json().encode()
        return await asyncio.to_thread(lambda: b"\n".join(self._lines()))

    def _lines(self) -> Iterator[bytes]:
        yield self.model_copy(update={"outputs": []}).model_dump_json().encode()
        for one in self.outputs:
            apart = max(1, _AT_ONCE * len(one.tokens) // max(1, values(one)))
            for first in range(0, max(1, len(one.tokens)), apart):
                part = slice(first, first + apart)
                about = {name: getattr(one, name)[part] for name in ("tokens", "times", "logprobs")}
                yield one.model_copy(update=about).model_dump_json().encode()

    @classmethod
    def read(cls, record: bytes) -> ResumePoint:
        """The point of a record. Other threads need not wait until all of a long one is read.
        Raises ValueError, often a ValidationError."""
        first, *more = record.split(b"\n")
        point = cls.model_validate_json(first)
        outputs = {one.number: one for one in point.outputs}
        for line in more:
            part = Progress.model_validate_json(line)
            one = outputs.get(part.number)
            if one is None:
                outputs[part.number] = part
                point.outputs.append(part)
                continue
            one.add(part)
        if sum(map(values, point.outputs)) > MOST_VALUES or len(outputs) > _MOST_OUTPUTS:
            raise ValueError(f"outputs: more than {MOST_VALUES} values, or {_MOST_OUTPUTS} of them")
        return point

    def anew(self) -> ResumePoint:
        """Where the same answer begins."""
        about = {"fingerprint": "", "messages": 0, "outputs": []}
        return self.model_copy(update=about)


class Answered:
    """Puts together what was passed on of one answer.

    Args:
        point: Where it begins.

    Attributes:
        begun: Whether the answer is one that can be resumed. False again if there was too much.
        replica: The name of the replica that has begun it last.
        left: Whether that replica has left it to others.
        pages: As `Cache.pages`, of that replica.
        point: Where it can be resumed.
    """

    def __init__(self, point: ResumePoint) -> None:
        self.begun, self.point, self.replica = False, point, ""
        self.left = False
        self.pages: Handle | None = None
        self._outputs: dict[int, Progress] = {}
        self._values = 0

    @property
    def has_tokens(self) -> bool:
        """Whether any token was passed on."""
        return any(one.tokens for one in self.point.outputs)

    def take(self, piece: Sequence[Any]) -> list[Any]:
        """Notes the marks of a piece, and returns the other parts."""
        parts = unmarked(piece)
        for part in piece:
            if isinstance(part, Begun):
                self.begun, self.replica = True, part.replica
                self.left = False
                if self.pages is not None:
                    self.pages.refs.clear()  # see `Handle`
                self.pages = None
                self.point.fingerprint = part.fingerprint
            elif isinstance(part, Passed):
                self._add(part)
            elif isinstance(part, Cache):
                self.left, self.pages = True, part.pages
        bodies = (part for part in parts if isinstance(part, dict) and part.get("body"))
        self.point.messages += len(list(bodies))
        return parts

    def _add(self, passed: Passed) -> None:
        self._values += values(passed)
        if self._values > MOST_VALUES:
            self.begun = False
            self._outputs.clear()
            self.point.outputs.clear()
        if not self.begun:
            return
        if passed.number not in self._outputs:
            made = Progress(number=passed.number, tokens=[], times=[], logprobs=[])
            self._outputs[passed.number] = made
            self.point.outputs.append(made)
        self._outputs[passed.number].add(passed)
