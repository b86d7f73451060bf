"""Makes the items of an answer from the pieces of its text, and the events about them."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from jaxserve.server.http.openai.responses.input_items import PREFIXES
from jaxserve.server.tools.calls import Arguments, CallBegin, Content, Piece, Reasoning

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


def read_items(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items in the form that later turns read: without log-probabilities."""
    read = []
    for item in items:
        if item["type"] == "message":
            parts = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
            item = {**item, "content": parts}
        read.append(dict(item))
    return read


class JsonList:
    """A list that is kept as JSON, since there may be millions of log-probabilities. A mark stands
    for it in objects until they are encoded.

    Attributes:
        mark: the mark.
        size: the JSON's bytes.
    """

    def __init__(self) -> None:
        self.mark = secrets.token_hex(16)
        self.size = 0
        self._pieces: list[bytes] = []

    def extend(self, entries: Sequence[Any]) -> None:
        """Appends entries."""
        if entries:
            self._pieces.append(to_json(entries, inf_nan_mode="null")[1:-1])
            self.size += len(self._pieces[-1])

    def put_into(self, json: bytes) -> bytes:
        """The JSON with the list in place of its marks."""
        mark = b'"%s"' % self.mark.encode()
        if mark not in json:  # as in most events
            return json
        return json.replace(mark, b"[%s]" % b",".join(self._pieces))


class _OpenItem(ABC):
    """The item that is growing. index: its index in the output. logprobs: the text's
    log-probabilities, if asked for. id: its id, which it is given before it begins."""

    kind: str

    def __init__(self, index: int, logprobs: JsonList | None = None) -> None:
        self._index, self._logprobs = index, logprobs
        self.id = ""
        self._pieces: list[str] = []

    def item(self, status: Status) -> dict[str, Any]:
        """The item so far."""
        return {"id": self.id, "type": self.kind, "status": status, **self._fields(status)}

    def begin(self) -> Iterator[Event]:
        """The events at its beginning."""
        yield self._event("output_item.added", item=self.item("in_progress"))

    @abstractmethod
    def more(self, text: str, logprobs: Sequence[Any]) -> Event:
        """The events for more of its text. logprobs: log-probabilities of the text."""

    def end(self, status: Status) -> Iterator[Event]:
        """The events at its end."""
        yield self._event("output_item.done", item=self.item(status))

    @abstractmethod
    def _fields(self, status: Status) -> dict[str, Any]:
        """The fields that only its type has."""

    def _event(self, name: str, /, **fields: Any) -> Event:
        return {"type": f"response.{name}", "output_index": self._index, **fields}

    def _of_item(self, name: str, /, **fields: Any) -> Event:
        return self._event(name, item_id=self.id, **fields)


class _TextItem(_OpenItem):
    """An item with a part of text."""

    part: str

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield self._of_part("content_part.added", part=self._part())

    def more(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._pieces.append(text)
        return self._of_part(f"{self.part}.delta", delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        part = self._part()
        text = {name: value for name, value in part.items() if name in ("text", "logprobs")}
        yield self._of_part(f"{self.part}.done", **text)
        yield self._of_part("content_part.done", part=part)
        yield from super().end(status)

    def _part(self) -> dict[str, Any]:
        return {"type": self.part, "text": "".join(self._pieces)}

    def _content(self, status: Status) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self._part()]

    def _of_part(self, name: str, /, **fields: Any) -> Event:
        return self._of_item(name, content_index=0, **fields)


class _MessageItem(_TextItem):
    kind, part = "message", "output_text"

    def more(self, text: str, logprobs: Sequence[Any]) -> Event:
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        return {**super().more(text, logprobs), "logprobs": logprobs}

    def _fields(self, status: Status) -> dict[str, Any]:
        return {"role": "assistant", "content": self._content(status)}

    def _part(self) -> dict[str, Any]:
        logprobs: Any = [] if self._logprobs is None else self._logprobs.mark
        return {**super()._part(), "annotations": [], "logprobs": logprobs}


class _ReasoningItem(_TextItem):
    kind, part = "reasoning", "reasoning_text"

    def _fields(self, status: Status) -> dict[str, Any]:
        return {"summary": [], "content": self._content(status)}


class _CallItem(_OpenItem):
    kind = "function_call"

    def __init__(self, index: int, name: str, call_id: str) -> None:
        super().__init__(index)
        self._call = {"call_id": call_id, "name": name}

    def more(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._pieces.append(text)
        return self._of_item("function_call_arguments.delta", delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        said = {"name": self._call["name"], "arguments": "".join(self._pieces)}
        yield self._of_item("function_call_arguments.done", **said)
        yield from super().end(status)

    def _fields(self, status: Status) -> dict[str, Any]:
        return {**self._call, "arguments": "".join(self._pieces)}


class OutputItems:
    """The items of one answer.

    Args:
        new_call_id: makes the id of a call.
        drawn: draws bytes that nobody can guess, for a purpose.
        logprobs: collects the text's log-probabilities; its mark stands for them in the message.
            None if they are not asked for. With log-probabilities there is at most one message.

    Attributes:
        items: the finished items.
    """

    def __init__(
        self,
        new_call_id: Callable[[], str],
        drawn: Callable[[str], bytes],
        logprobs: JsonList | None = None,
    ) -> None:
        self._new_call_id, self._drawn, self._logprobs = new_call_id, drawn, logprobs
        self._open: _OpenItem | None = None
        self.items: list[dict[str, Any]] = []

    def add(self, pieces: Iterable[Piece], logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events for the next pieces. logprobs: log-probabilities of their text."""
        for piece in pieces:
            if isinstance(piece, CallBegin):
                yield from self._begin(_CallItem(self._place, piece.name, self._new_call_id()))
                continue
            kind = _KINDS[type(piece)]
            if not isinstance(self._open, kind):
                assert kind is not _CallItem
                yield from self._begin(kind(self._place, self._logprobs))
            assert self._open is not None and not isinstance(piece, CallBegin)
            if kind is not _MessageItem:
                yield self._open.more(piece.text, ())
                continue
            yield self._open.more(piece.text, logprobs)
            logprobs = ()

    def finish(self, status: Status) -> Iterator[Event]:
        """The events at the end. A status other than completed is given to the last item. An answer
        without items becomes an empty message."""
        if self._open is None:
            yield from self._begin(_MessageItem(self._place, self._logprobs))
        yield from self._close(status)

    @property
    def _place(self) -> int:
        return len(self.items) + (self._open is not None)

    def _begin(self, item: _OpenItem) -> Iterator[Event]:
        yield from self._close("completed")
        drawn = self._drawn(f"item-{self._place}")
        item.id, self._open = f"{PREFIXES[item.kind]}_{drawn.hex()}", item
        yield from item.begin()

    def _close(self, status: Status) -> Iterator[Event]:
        if self._open is not None:
            self.items.append(self._open.item(status))
            yield from self._open.end(status)
            self._open = None


_KINDS: dict[type[Piece], type[_OpenItem]] = {
    Content: _MessageItem,
    Reasoning: _ReasoningItem,
    Arguments: _CallItem,
}
