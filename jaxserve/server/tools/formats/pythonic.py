"""[f(a=1, b="x"), g()]: Llama 3.2 and 4, and others that call functions as Python does."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool, compact, flat
from jaxserve.server.tools.parser import CallParser, Steps
from jaxserve.server.tools.python_literals import MAX_LITERAL, literal_value
from jaxserve.server.tools.registry import LeadingFormat, register
from jaxserve.server.tools.rules import Rules, literal

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"([a-zA-Z0-9_-]{1,64})\s*(?=\()")
_LONGEST_NAME = 128
_MARKS = re.compile(r"[\"'()\[\]{}]")
_QUOTED = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


class _CallEnd:
    """Finds where a call ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._quote, self._escaped = 0, "", False

    def feed(self, text: str) -> int | None:
        """The index after the call's last bracket."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while (match := (_QUOTED.get(self._quote) or _MARKS).search(text, at)) is not None:
            at, mark = match.end(), match[0]
            if mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark in "\"'":
                self._quote = "" if self._quote else mark
            elif mark in "([{":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class _Parser(CallParser):
    markers = (_BEGIN,)

    def _beginning(self) -> Steps[None]:
        space = yield from self._skip_space()
        if self._held.startswith("["):
            yield from self._list(space)
        else:
            self._content(space)

    def _after(self, marker: str) -> Steps[None]:
        before = marker + (yield from self._skip_space())
        if not self._held.startswith("["):
            self._content(before)
        elif (yield from self._list(before)):
            yield from self._skip_space()
            yield from self._literal(_END)

    def _list(self, before: str) -> Steps[bool]:
        before += self._take(1)
        called = False
        while True:
            before += yield from self._skip_space()
            if not self._may_call or not (yield from self._call(before)):
                break
            called, before = True, ""
            yield from self._skip_space()
            if self._held.startswith("]"):
                self._take(1)
                return True
            if not self._held.startswith(","):
                return True
            before = self._take(1)
        if not self._may_call:
            self._content(before)
        return called

    def _call(self, before: str) -> Steps[bool]:
        """Reads one call. If there is none, the text read so far is content."""
        while "(" not in self._held[:_LONGEST_NAME] and len(self._held) < _LONGEST_NAME:
            if self._ended:
                break
            yield
        name = _NAME.match(self._held[:_LONGEST_NAME])
        if name is None or name[1] not in self._tools:
            self._content(before)
            return False
        end, seen, place = _CallEnd(), name.end(), None
        while place is None and not self._ended and seen <= MAX_LITERAL:
            place = end.feed(self._held[seen:])
            if place is None:
                seen = len(self._held)
                yield
        if place is None:
            place = end.feed(self._held[seen:])
        length = len(self._held) if place is None else seen + place
        text = self._take(length)
        arguments = (
            None if place is None or length > MAX_LITERAL else _arguments(text[name.end() :])
        )
        if arguments is None:
            self._content(before + text)
            return False
        self._begin(name[1])
        self._arguments(arguments)
        return True


def _arguments(text: str) -> str | None:
    """The arguments in brackets as JSON; None if they are malformed."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        lines = f"f{text}".encode().split(b"\n")
        values = {keyword.arg: literal_value(keyword.value, lines) for keyword in call.keywords}
        if len(values) < len(call.keywords) or None in values:
            return None
        return compact(values, finite=True)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


@register
class Pythonic(LeadingFormat):
    """A list of calls, at the beginning of the text or behind a tag."""

    name = "pythonic"
    signs = (_BEGIN, "[func_name1(", "[func1(")
    markers = (_BEGIN, _END)
    openers = r"\["
    instructions = (
        "To call functions, write a list of calls as in Python, and nothing else:\n"
        '[NAME(ARGUMENT="VALUE")]'
    )
    parser = _Parser

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`. Values are JSON, which the parser also reads."""
        schema, where = flat(tool.parameters), f"tools.{place}.function.parameters"
        further = {"anyOf", "oneOf", "allOf", "$ref", "patternProperties"} & schema.keys()
        if further:
            problem = f"the format {self.name} cannot hold arguments to {min(further)!r}"
            raise InvalidRequest(where, problem)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        if "properties" not in schema and schema.get("additionalProperties", True) is not False:
            argument = rules.add(
                f"any_{rules.number()}", f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}=/ {rules.schema({})}"
            )
            return f'{literal(tool.name)} "(" ({argument} (", " {argument}){{0,31}})? ")"'
        names = list(properties)
        for name in names:
            if not (name.isascii() and name.isidentifier()) or name in _KEYWORDS:
                problem = f"the format {self.name} cannot write this name"
                raise InvalidRequest(f"{where}.properties.{name[:64]}", problem)
        # From the last parameter to the first: the rules for what may follow it, and for a text
        # without it.
        after_some, after_none = '")"', '")"'
        for name in reversed(names):
            parameter = properties[name]
            parameter = (
                parameter if isinstance(parameter, dict) else {} if parameter else {"not": {}}
            )
            number = rules.number()
            value = rules.add(
                f"value_{number}", f"{literal(f'{name}=')} {rules.schema({**shared, **parameter})}"
            )
            behind, none = f'", " {value} {after_some}', f"{value} {after_some}"
            if name not in required:
                behind, none = f"{behind} | {after_some}", f"{none} | {after_none}"
            after_some = rules.add(f"some_{number}", behind)
            after_none = rules.add(f"none_{number}", none)
        return f'{literal(tool.name)} "(" {after_none}'

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        calls = f'call (", " call){{0,{MAX_CALLS - 1}}}' if parallel else "call"
        return f'"[" {calls} "]"'

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        return f"[{', '.join(map(_as_python, calls))}]"


_KEYWORDS = frozenset(keyword.kwlist)


def _as_python(call: Call) -> str:
    arguments: dict[str, Any] = json.loads(call.arguments)
    return f"{call.name}({', '.join(f'{name}={compact(v)}' for name, v in arguments.items())})"
