"""Calls that are JSON objects with a name and arguments, in text that comes in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.server.tools.calls import compact
from jaxserve.server.tools.parser import CallParser, Steps, ValueEnd

# Beginnings of calls that can be streamed. White space is bounded, and so is the text that is
# searched.
_GAP = r"[ \t\r\n]{0,32}"
_HEAD = re.compile(
    rf'\{{{_GAP}(?:"type"{_GAP}:{_GAP}"function"{_GAP},{_GAP})?'
    rf'"name"{_GAP}:{_GAP}"([a-zA-Z0-9_-]{{1,64}})"{_GAP},{_GAP}'
    rf'"(?:arguments|parameters)"{_GAP}:{_GAP}(?=\{{)'
)
_LONGEST_HEAD = 1024
NOTHING = ("null", '""')
"""What models write instead of an empty object."""


class JsonCallParser(CallParser):
    """Reads objects such as {"name": "f", "arguments": {...}}, and lists of them."""

    def _calls(self, before: str, end: str = "") -> Steps[bool]:
        """Reads an object or a list of objects, if there is one.

        Args:
            before: text already read, which is content if no call follows.
            end: text that ends a malformed call, even within a string.

        Returns:
            Whether there was a call. If not, all text read is content.
        """
        before += yield from self._skip_space()
        if self._held.startswith("["):
            return (yield from self._list(before + self._take(1), end))
        if self._held.startswith("{"):
            return (yield from self._object(before, end))
        self._content(before)
        return False

    def _list(self, before: str, end: str) -> Steps[bool]:
        called = False
        while True:
            before += yield from self._skip_space()
            if not (self._held.startswith("{") and self._may_call):
                break
            if not (yield from self._object(before, end)):
                return called
            called, before = True, ""
            yield from self._skip_space()
            if not self._held.startswith(","):
                break
            before = self._take(1)
        if called and not before and self._held.startswith("]"):
            self._take(1)
        else:
            self._content(before)
        return called

    def _object(self, before: str, end: str = "") -> Steps[bool]:
        """Reads an object that begins here; arguments and result as in `_calls`."""
        value, seen, place = ValueEnd(), 0, None
        while True:
            if seen < _LONGEST_HEAD:
                head = _HEAD.match(self._held)
                if head is not None and head[1] in self._tools:
                    self._take(head.end())
                    self._begin(head[1])
                    if (yield from self._value()):
                        yield from self._rest()
                    return True
            cut = self._held.find(end, max(seen - len(end), 0)) if end else -1
            place = value.feed(self._held[seen:])
            place = None if place is None else seen + place
            if cut >= 0 and (place is None or cut < place):
                self._content(before + self._take(cut + len(end)))
                return False
            if place is not None:
                return self._whole(before, self._take(place))
            if self._ended:
                self._content(before + self._take(len(self._held)))
                return False
            seen = len(self._held)
            yield

    def _value(self) -> Steps[bool]:
        """Passes on the arguments as they come. Returns whether they are complete."""
        value = ValueEnd()
        while True:
            place = value.feed(self._held)
            self._arguments(self._take(len(self._held) if place is None else place))
            if place is not None or self._ended:
                return place is not None
            yield

    def _rest(self) -> Steps[None]:
        """Reads the rest of an object after its arguments. It belongs to the call if the object is
        complete."""
        before = yield from self._skip_space()
        if self._held.startswith("}"):
            self._take(1)
            return
        if not self._held.startswith(","):
            self._content(before)
            return
        value, seen = ValueEnd(depth=1), 0
        while True:
            place = value.feed(self._held[seen:])
            if place is not None:
                self._take(seen + place)
                return
            if self._ended:
                self._content(before + self._take(len(self._held)))
                return
            seen = len(self._held)
            yield

    def _whole(self, before: str, text: str) -> bool:
        """Reads a call whose name is not first."""
        call = _read(text)
        if call is None or call[0] not in self._tools:
            self._content(before + text)
            return False
        self._begin(call[0])
        self._arguments(call[1])
        return True


def _read(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object; None if it is not a call."""
    try:
        call: Any = json.loads(text)
        call = call.get("function", call)
        if isinstance(call, str):  # {"function": "f", "arguments": {}}
            call = {**json.loads(text), "name": call}
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments) if arguments.strip() else None
        arguments = {} if arguments is None else arguments
        written = compact(arguments, finite=True)
    except (ValueError, AttributeError, RecursionError):
        return None
    return (name, written) if isinstance(name, str) and isinstance(arguments, dict) else None
