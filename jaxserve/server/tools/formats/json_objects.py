"""{"name": ..., "arguments": {...}}, or a list of them, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool
from jaxserve.server.tools.json_calls import JsonCallParser
from jaxserve.server.tools.parser import Steps
from jaxserve.server.tools.registry import LeadingFormat, register
from jaxserve.server.tools.rules import Rules, literal, schema_of


class _Parser(JsonCallParser):
    def _beginning(self) -> Steps[None]:
        yield from self._calls("")

    def _after(self, marker: str) -> Steps[None]:
        raise AssertionError(marker)  # the format has no markers


@register
class JsonObjects(LeadingFormat):
    """Bare objects at the beginning of the text. The format has to be chosen by name: templates
    show no sign of it."""

    name = "json"
    plain_json = True
    openers = r"\{\["
    instructions = (
        "To call a function, write its name and arguments as JSON, and nothing else:\n"
        '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}'
    )
    parser = _Parser

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        begin = f'{{"name": "{tool.name}", "arguments": '
        return f'{literal(begin)} {rules.schema(schema_of(tool))} "}}"'

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        return f'call | "[" call (", " call){{0,{MAX_CALLS - 1}}} "]"' if parallel else "call"

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        objects = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in calls]
        return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"
