"""{"name": ..., "parameters": {...}}, several with semicolons between them: Llama 3.1 to 3.3."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool
from jaxserve.server.tools.json_calls import JsonCallParser
from jaxserve.server.tools.parser import Steps
from jaxserve.server.tools.registry import LeadingFormat, register
from jaxserve.server.tools.rules import Rules, literal, schema_of

_TAG = "<|python_tag|>"


class _Parser(JsonCallParser):
    markers = (_TAG,)

    def _beginning(self) -> Steps[None]:
        space = yield from self._skip_space()
        if self._held.startswith("{"):
            yield from self._several(space)
        else:
            self._content(space)

    def _after(self, marker: str) -> Steps[None]:
        yield from self._several(marker)

    def _several(self, before: str) -> Steps[None]:
        while (yield from self._calls(before)):
            yield from self._skip_space()
            if not (self._held.startswith(";") and self._may_call):
                return
            before = self._take(1)


@register
class Llama3(LeadingFormat):
    """Bare objects at the beginning of the text, or behind a tag."""

    name = "llama3"
    signs = (_TAG, '"parameters": dictionary of argument name')
    rank = 2
    markers = (_TAG,)
    plain_json = True
    openers = r"\{"
    instructions = (
        "To call a function, write its name and arguments as JSON, and nothing else:\n"
        '{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}'
    )
    parser = _Parser

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        begin = f'{{"name": "{tool.name}", "parameters": '
        return f'{literal(begin)} {rules.schema(schema_of(tool))} "}}"'

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        calls = f'call ("; " call){{0,{MAX_CALLS - 1}}}' if parallel else "call"
        token = rules.token(_TAG)
        return f"{token}? {calls}" if token else calls

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        return "; ".join(
            f'{{"name": "{call.name}", "parameters": {call.arguments}}}' for call in calls
        )
