"""The type of an unquoted text, by what its schema allows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any
from urllib.parse import unquote

from jaxserve.server.tools.python_literals import read_literal

_KINDS = frozenset(("string", "null", "boolean", "integer", "number", "array", "object"))
_AROUND = ("allOf", "anyOf", "oneOf", "$ref")
_LENGTHS = {"minLength", "maxLength"}
_NO_LIMITS = {
    *("type", "enum", "const", *_AROUND, "$defs", "definitions"),
    *("title", "description", "default", "examples", "$comment", "deprecated"),
    *("readOnly", "writeOnly"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that only list the allowed strings or say nothing of them, and keywords that are handled
otherwise."""
_DEEPEST = 64
_NONE = object()


@dataclass(frozen=True)
class Allowed:
    """The values that a schema allows, as far as they matter for unquoted texts.

    Attributes:
        kinds: types by their names in JSON Schema.
        texts: the only allowed strings; None for any.
        least: least characters of strings.
        most: most characters; None for any number.
        further: another keyword that limits strings; "" for none.
    """

    kinds: frozenset[str] = _KINDS
    texts: frozenset[str] | None = None
    least: int = 0
    most: int | None = None
    further: str = ""

    @property
    def only_text(self) -> bool:
        """Whether every text is a string, whatever it looks like."""
        return self.kinds == {"string"}

    @property
    def any_text(self) -> bool:
        """Whether any string is allowed."""
        limits = (self.texts, self.least, self.most, self.further)
        return "string" in self.kinds and limits == (None, 0, None, "")

    def has(self, text: str) -> bool:
        """Whether this text is certainly an allowed string."""
        fits = self.least <= len(text) and (self.most is None or len(text) <= self.most)
        known = self.texts is None or text in self.texts
        return "string" in self.kinds and fits and known and not self.further

    def __and__(self, other: Allowed) -> Allowed:
        several = [side.texts for side in (self, other) if side.texts is not None]
        mosts = [side.most for side in (self, other) if side.most is not None]
        return Allowed(
            self.kinds & other.kinds,
            frozenset.intersection(*several) if several else None,
            max(self.least, other.least),
            min(mosts, default=None),
            self.further or other.further,
        )

    def __or__(self, other: Allowed) -> Allowed:
        kinds = self.kinds | other.kinds
        sides = [side for side in (self, other) if "string" in side.kinds]
        free = next((side for side in sides if side.any_text), sides[0] if sides else self)
        if len(sides) < 2 or free.any_text or replaced(self, kinds) == replaced(other, kinds):
            return replaced(free, kinds)
        if self.texts is not None and other.texts is not None:
            return Allowed(kinds, self.texts | other.texts)
        return Allowed(kinds, further="anyOf")


def replaced(allowed: Allowed, kinds: frozenset[str]) -> Allowed:
    """The same limits on strings, with these types."""
    return Allowed(kinds, allowed.texts, allowed.least, allowed.most, allowed.further)


def allowed_by(schema: Any, root: Mapping[str, Any]) -> Allowed:
    """The values that a schema allows. root: the whole schema, in which references are resolved."""
    return _allowed(schema, root, {}, _DEEPEST)


def _allowed(schema: Any, root: Any, known: dict[str, Allowed], depth: int) -> Allowed:
    """known: results by reference, so that each reference is followed once."""
    if schema is False:
        return Allowed(frozenset())
    if not isinstance(schema, Mapping) or not depth:
        return Allowed()
    allowed = _own(schema)
    for part in schema.get("allOf", ()):
        allowed &= _allowed(part, root, known, depth - 1)
    for name in ("anyOf", "oneOf"):
        if schema.get(name):
            alternatives = [_allowed(part, root, known, depth - 1) for part in schema[name]]
            allowed &= reduce(Allowed.__or__, alternatives)
    if (ref := schema.get("$ref")) is not None:
        if ref not in known:
            known[ref] = Allowed(frozenset())  # a circular reference allows nothing more
            known[ref] = _allowed(_pointed(root, ref), root, known, depth - 1)
        allowed &= known[ref]
    return allowed


def _own(schema: Mapping[str, Any]) -> Allowed:
    kinds = schema.get("type", _KINDS)
    kinds = frozenset([kinds] if isinstance(kinds, str) else kinds)
    if "number" in kinds:
        kinds |= {"integer"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    texts = None
    if values is not None:
        kinds &= frozenset(kind for value in values for kind in _kinds_of(value))
        texts = frozenset(value for value in values if isinstance(value, str))
    further = sorted(schema.keys() - _NO_LIMITS - _LENGTHS)
    most, least = _length(schema.get("maxLength")), _length(schema.get("minLength"))
    return Allowed(kinds, texts, least or 0, most, further[0] if further else "")


def _length(value: Any) -> int | None:
    """The length; None if it is invalid, since lengths were not checked before."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _kinds_of(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer", "number")
        case float():
            return ("integer", "number") if value.is_integer() else ("number",)
        case str():
            return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def _pointed(root: Any, ref: Any) -> Any:
    """The target of a reference; None if it is not in the root."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    target = root
    for name in unquote(ref).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(name)
        elif isinstance(target, list) and name.isascii() and name.isdigit():
            target = target[int(name[:9])] if int(name[:9]) < len(target) else None
        else:
            return None
    return target


def value_of(text: str, allowed: Allowed) -> Any:
    """The value of an unquoted text: a string if any string is allowed, or null if the schema names
    that, too. If strings are limited, quoted strings, as a grammar has them, and matching strings
    come first, then the value as JSON or as a Python literal."""
    if allowed.only_text:
        return text
    named = allowed.kinds != _KINDS  # otherwise the schema says nothing
    if text == "null" and "null" in allowed.kinds and not (allowed.texts and text in allowed.texts):
        return None
    read = _as_json(text)
    if allowed.any_text:
        return read if not named and isinstance(read, dict | list) else text
    if "string" in allowed.kinds and (isinstance(read, str) or allowed.has(text)):
        return read if isinstance(read, str) else text
    for read_value in (read, _as_python(text)):
        if read_value is not _NONE and allowed.kinds.intersection(_kinds_of(read_value)):
            return read_value
    return text if read is _NONE or "string" in allowed.kinds else read


def _as_json(text: str) -> Any:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NONE
    return value


def _as_python(text: str) -> Any:
    try:
        return read_literal(text.strip())
    except ValueError:
        return _NONE
