"""<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>: Qwen3-Coder.

Strings are written as they are, other values as JSON; the schema decides which type a value has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.sched.request import InvalidRequest
from jaxserve.server.tools.calls import MAX_CALLS, Call, Tool, compact, flat
from jaxserve.server.tools.parser import CallParser, Steps
from jaxserve.server.tools.registry import MarkedFormat, register
from jaxserve.server.tools.rules import Rules, literal
from jaxserve.server.tools.text_values import Allowed, allowed_by, value_of

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_LONGEST_NAME = 256


class _Parser(CallParser):
    markers = (_BEGIN, _FUNCTION)

    def _after(self, marker: str) -> Steps[None]:
        before = marker
        if marker == _BEGIN:
            before += yield from self._skip_space()
            if not (yield from self._literal(_FUNCTION)):
                self._content(before)
                return
            before += _FUNCTION
        name = yield from self._until(">", _LONGEST_NAME)
        if name is None or name not in self._tools:
            self._content(before if name is None else f"{before}{name}>")
            return
        self._begin(name)
        if (yield from self._parameters(self._tools[name].parameters)):
            yield from self._skip_space()
            if marker == _BEGIN:
                yield from self._literal(_END)

    def _parameters(self, root: Mapping[str, Any]) -> Steps[bool]:
        """Reads the parameters. Returns whether the call is complete. root: the schema of all
        parameters."""
        separator, schemas = "{", flat(root)
        known, others = schemas.get("properties", {}), schemas.get("additionalProperties")
        while True:
            space = yield from self._skip_space()
            if (yield from self._literal(_FUNCTION_END)):
                self._arguments("{}" if separator == "{" else "}")
                return True
            if not (yield from self._literal(_PARAMETER)):
                self._content(space)
                return False
            name = yield from self._until(">", _LONGEST_NAME)
            if name is None:
                self._content(_PARAMETER)
                return False
            value = yield from self._parameter_value()
            text, complete = value
            written = compact(value_of(text, allowed_by(known.get(name, others), root)))
            if not complete:  # its type is unknown until it is complete
                written = compact(text)[:-1]
            self._arguments(f"{separator}{compact(name)}: {written}")
            if not complete:
                return False
            separator = ", "

    def _parameter_value(self) -> Steps[tuple[str, bool]]:
        """A value's text, and whether it is complete."""
        pieces: list[str] = []
        while True:
            at = self._held.find(_PARAMETER_END)
            if at >= 0:
                pieces.append(self._take(at))
                self._take(len(_PARAMETER_END))
            elif self._ended:
                pieces.append(self._take(len(self._held)))
            else:
                pieces.append(self._take(max(len(self._held) - len(_PARAMETER_END) + 1, 0)))
                yield
                continue
            text = "".join(pieces).removeprefix("\n")
            return text.removesuffix("\n"), at >= 0


@register
class Qwen(MarkedFormat):
    """Tags for the function and for each of its parameters."""

    name = "qwen"
    signs = (_FUNCTION,)
    markers = (_BEGIN, _END)
    trigger = _BEGIN
    instructions = (
        "To call a function, write its name and arguments between tags, and nothing else:\n"
        f"{_BEGIN}\n{_FUNCTION}NAME>\n{_PARAMETER}ARGUMENT>\nVALUE\n{_PARAMETER_END}\n"
        f"{_FUNCTION_END}\n{_END}"
    )
    parser = _Parser

    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """See `ToolFormat`."""
        schema = flat(tool.parameters)
        where = f"tools.{place}.function.parameters"
        further = {"anyOf", "oneOf", "allOf", "$ref", "patternProperties"} & schema.keys()
        if further:
            problem = f"the format {self.name} cannot hold arguments to {min(further)!r}"
            raise InvalidRequest(where, problem)
        if "properties" not in schema and schema.get("additionalProperties", True) is not False:
            # Any: one parameter after the other, with JSON or text.
            name, value = rules.number(), rules.add(f"any_{rules.number()}[lazy]", _any_value())
            key = rules.add(f"key_{name}[lazy]", '/[a-zA-Z0-9_.-]{1,64}/ ">"')
            parameter = rules.add(
                f"one_{name}", f"{literal(_PARAMETER)} {key} {literal(chr(10))} {value}"
            )
            return self._function(tool, f"{parameter}*")
        required = schema.get("required", [])
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parameters = [
            self._parameter(rules, name, each, shared, f"{where}.properties.{name[:64]}")
            + ("" if name in required else "?")
            for name, each in schema.get("properties", {}).items()
        ]
        return self._function(tool, " ".join(parameters))

    @staticmethod
    def _function(tool: Tool, parameters: str) -> str:
        begin, end = f"{_FUNCTION}{tool.name}>\n", _FUNCTION_END
        return f"{literal(begin)} {parameters} {literal(end)}"

    def _parameter(
        self, rules: Rules, name: str, schema: Any, shared: Mapping[str, Any], where: str
    ) -> str:
        if not name or len(name) > _LONGEST_NAME or ">" in name or not name.isprintable():
            raise InvalidRequest(where, f"the format {self.name} cannot write this name")
        number = rules.number()
        allowed = allowed_by(schema, shared)
        if allowed.only_text or allowed.any_text:
            value = self._text_value(rules, allowed, where)
        else:
            value_schema = schema if isinstance(schema, dict) else {} if schema else {"not": {}}
            value = f"{rules.schema({**shared, **value_schema})} {literal(_value_end())}"
        begin = f"{_PARAMETER}{name}>\n"
        return rules.add(f"parameter_{number}", f"{literal(begin)} {value}")

    def _text_value(self, rules: Rules, allowed: Allowed, where: str) -> str:
        if allowed.further:
            problem = f"the format {self.name} cannot hold strings to {allowed.further[:64]!r}"
            raise InvalidRequest(where, problem)
        if allowed.texts is not None:
            texts = sorted(filter(allowed.has, allowed.texts))
            if not texts:
                raise InvalidRequest(where, "no value is valid")
            return f"({' | '.join(map(literal, texts))}) {literal(_value_end())}"
        least, most = allowed.least, "" if allowed.most is None else allowed.most
        length = f"(?s:.{{{least},{most}}})" if (least, most) != (0, "") else "(?s:.*)"
        lazy = f"text_{rules.number()}[lazy]"
        return rules.add(lazy, f"/{length}/ {literal(_value_end())}")

    def held(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        tag = rules.add("tag", f"{rules.marker(_BEGIN)} {self.after_trigger(rules, parallel)}")
        return f'{tag} ("\\n" {tag}){{0,{MAX_CALLS - 1}}}' if parallel else tag

    def after_trigger(self, rules: Rules, parallel: bool) -> str:
        """See `MarkedFormat`."""
        return f'"\\n" call "\\n" {rules.marker(_END)}'

    def written(self, calls: Sequence[Call]) -> str:
        """See `ToolFormat`."""
        return "\n".join(map(_tagged, calls))


def _value_end() -> str:
    return f"\n{_PARAMETER_END}\n"


def _any_value() -> str:
    return f"/(?s:.*)/ {literal(_value_end())}"


def _tagged(call: Call) -> str:
    arguments: dict[str, Any] = json.loads(call.arguments)
    parameters = "".join(
        f"{_PARAMETER}{name}>\n{value if isinstance(value, str) else compact(value)}"
        f"\n{_PARAMETER_END}\n"
        for name, value in arguments.items()
    )
    return f"{_BEGIN}\n{_FUNCTION}{call.name}>\n{parameters}{_FUNCTION_END}\n{_END}"
