"""[TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}: Mistral."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool
from jaxserve.server.tools.json_calls import NOTHING, JsonCallParser
from jaxserve.server.tools.parser import Steps
from jaxserve.server.tools.registry import MarkedFormat, nine_characters, register
from jaxserve.server.tools.rules import Rules, literal, schema_of

_BEGIN, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*")
_NOTHING = re.compile(
    rf"{_NAMED.pattern}(?<=\[ARGS\])(?:\s*(?:{'|'.join(NOTHING)})\s*(?=\[TOOL_CALLS\]|\Z)"
    r"|\s*(?=\[TOOL_CALLS\]))"
)
"""Matches a call without arguments: the text after the name shows that none will follow."""
_MOST = 256  # characters from the marker to the arguments


class _Parser(JsonCallParser):
    markers = (_BEGIN,)

    def _after(self, marker: str) -> Steps[None]:
        before = marker + (yield from self._skip_space())
        if self._held.startswith(("[", "{")):
            yield from self._calls(before)
            return
        while (at := self._held.find("{", 0, _MOST)) < 0 and len(self._held) < _MOST:
            if self._ended:
                break
            yield
        named = _NAMED.fullmatch(self._held[:at]) if at >= 0 else None
        nothing = _NOTHING.match(self._held) if named is None else None
        if nothing is not None and nothing[1] in self._tools:
            self._take(nothing.end())
            self._begin(nothing[1])
            self._arguments("{}")
            return
        if named is None or named[1] not in self._tools:
            self._content(before)
            return
        self._take(at)
        self._begin(named[1])
        yield from self._value()


@register
class Mistral(MarkedFormat):
    """A marker, then a list, or a name and its arguments; newer templates have the second form."""

    name = "mistral"
    signs = (_BEGIN,)
    markers = (_BEGIN, _ID, _ARGS)
    trigger = _BEGIN
    instructions = (
        "To call a function, write its name and arguments in this form, and nothing else:\n"
        f'{_BEGIN}[{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}]'
    )
    parser = _Parser

    @property
    def _newer(self) -> bool:
        return _ARGS in self._source

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        schema = rules.schema(schema_of(tool))
        if self._newer:
            return f"{literal(tool.name)} {rules.marker(_ARGS)} {schema}"
        begin = f'{{"name": "{tool.name}", "arguments": '
        return f'{literal(begin)} {schema} "}}"'

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        if not self._newer:
            return f"{rules.marker(_BEGIN)} {self._list(parallel)}"
        marked = rules.add("marked", f"{rules.marker(_BEGIN)} call")
        return f"{marked}{{1,{MAX_CALLS}}}" if parallel else marked

    @staticmethod
    def _list(parallel: bool) -> str:
        calls = f'call (", " call){{0,{MAX_CALLS - 1}}}' if parallel else "call"
        return f'"[" {calls} "]"'

    def after_trigger(self, rules: Rules, parallel: bool) -> str:
        """See `MarkedFormat`."""
        return "call" if self._newer else self._list(parallel)

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        if self._newer:
            return "".join(f"{_BEGIN}{call.name}{_ARGS}{call.arguments}" for call in calls)
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        return f"{_BEGIN}[{', '.join(objects)}]"

    def id_of(self, digits: bytes) -> str:
        """Nine letters and digits: its templates refuse others."""
        return nine_characters(digits)
