"""<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>: gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool
from jaxserve.server.tools.json_calls import NOTHING, JsonCallParser
from jaxserve.server.tools.parser import Steps
from jaxserve.server.tools.registry import LeadingFormat, register
from jaxserve.server.tools.rules import Rules, literal, schema_of

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ROLE = f"{_START}assistant"
_CONSTRAIN, _CALL, _TO = "<|constrain|>", "<|call|>", "to=functions."
_BEGIN = f"{_CHANNEL}commentary {_TO}"
_MOST = 128  # characters from the marker to the arguments
_HEAD = re.compile(
    r"([a-zA-Z0-9_-]{1,64})\s*"
    r"(?:<\|channel\|>(?:commentary|analysis)\s*)?(?:<\|constrain\|>)?\s*(?:json)?\s*"
)


class _Parser(JsonCallParser):
    markers = (
        *(f"{role}{_BEGIN}" for role in ("", _ROLE)),
        *(f"{role} {_TO}" for role in ("", _ROLE)),
        f"{_CHANNEL}analysis {_TO}",
    )

    def _after(self, marker: str) -> Steps[None]:
        header = yield from self._until(_MESSAGE, _MOST)
        match = None if header is None else _HEAD.fullmatch(header)
        before = marker if header is None else marker + header + _MESSAGE
        if header is not None:
            before += yield from self._skip_space()
        if match is None or match[1] not in self._tools:
            self._content(before)
        elif self._held.startswith("{"):
            self._begin(match[1])
            if (yield from self._value()):
                yield from self._literal(_CALL)
        else:
            nothing = yield from self._literal(*NOTHING)
            before += nothing + (yield from self._skip_space())
            closed = yield from self._literal(_CALL)
            if closed or (nothing and not self._held):
                self._begin(match[1])
                self._arguments("{}")
            else:
                self._content(before)


@register
class Harmony(LeadingFormat):
    """A message to a function, at the end of the text."""

    name = "harmony"
    signs = ("<|channel|>commentary", "<|channel|>analysis", "<|channel|>final")
    rank = -1
    markers = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _CALL)
    holds_some = False
    openers = "<"
    parser = _Parser
    instructions = (
        "To call a function, write a message to it in the channel commentary, and nothing else:\n"
        f'{_BEGIN}NAME {_CONSTRAIN}json{_MESSAGE}{{"ARGUMENT": "VALUE"}}{_CALL}'
    )

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        head = literal(f"commentary {_TO}{tool.name} ")
        form = f'{rules.marker(_CONSTRAIN)} "json" {rules.marker(_MESSAGE)}'
        return f"{rules.marker(_CHANNEL)} {head} {form} {rules.schema(schema_of(tool))}"

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`. There is only one call if the model takes the mark after a call for the
        end of the text."""
        if not parallel:
            return "call"
        between = f'{rules.marker(_CALL)} {rules.marker(_START)} "assistant"'
        return f"call ({between} call){{0,{MAX_CALLS - 1}}}"

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        return f"{_CALL}{_ROLE}".join(
            f"{_BEGIN}{call.name} {_CONSTRAIN}json{_MESSAGE}{call.arguments}" for call in calls
        )
