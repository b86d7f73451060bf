"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, SmolLM2."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool
from jaxserve.server.tools.json_calls import JsonCallParser
from jaxserve.server.tools.parser import Steps
from jaxserve.server.tools.registry import MarkedFormat, register
from jaxserve.server.tools.rules import Rules, literal, schema_of

_BEGIN, _END = "<tool_call>", "</tool_call>"


class _Parser(JsonCallParser):
    markers = (_BEGIN,)

    def _after(self, marker: str) -> Steps[None]:
        if not (yield from self._calls(marker, _END)):
            return
        while True:
            yield from self._skip_space()
            if not (self._held.startswith("{") and self._may_call):
                break
            if not (yield from self._object("", _END)):
                return
        yield from self._literal(_END)


@register
class Hermes(MarkedFormat):
    """Objects between tags."""

    name = "hermes"
    signs = (_BEGIN,)
    rank = 1
    markers = (_BEGIN, _END)
    trigger = _BEGIN
    instructions = (
        "To call a function, write its name and arguments as JSON between tags, and nothing else:\n"
        f'{_BEGIN}\n{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{_END}'
    )
    parser = _Parser

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        begin = f'{{"name": "{tool.name}", "arguments": '
        return f'{literal(begin)} {rules.schema(schema_of(tool))} "}}"'

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        tagged = f"{rules.marker(_BEGIN)} {self.after_trigger(rules, parallel)}"
        tag = rules.add("tag", tagged)
        return f'{tag} ("\\n" {tag}){{0,{MAX_CALLS - 1}}}' if parallel else tag

    def after_trigger(self, rules: Rules, parallel: bool) -> str:
        """See `MarkedFormat`."""
        return f'"\\n" call "\\n" {rules.marker(_END)}'

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        return "\n".join(
            f'{_BEGIN}\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n{_END}'
            for call in calls
        )
