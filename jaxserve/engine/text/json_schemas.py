"""Rewrites JSON Schemas into forms that llguidance can enforce.

Common schemas come from pydantic, zod and OpenAPI. Much of what they contain and the compiler
rejects can be written differently (`compilable`). Everything else is left for the compiler to
refuse, or is removed and reported (`relaxed`).
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Schema = Any  # a mapping or a boolean, unless it is invalid

_ONE = (
    *("items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
_NOTES = frozenset(
    {"title", "description", "$comment", "examples", "default", "deprecated", "format"}
)
_UNHELD = (
    *("uniqueItems", "propertyNames", "not", "if", "then", "else", "contains", "minContains"),
    *("maxContains", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
_NO_REGULAR = re.compile(r"\(\?<?[=!]|\\[bB1-9]")  # look-around, word boundaries, back-references
# Limits of the compiler's integers, 64 bits that come through floats, and of other numbers.
_EXACT, _LAST, _LAST_NUMBER, _LONGEST, _BEYOND = 1 << 53, (1 << 63) - 1024, 9e18, 10**18, 10**19
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MOST_NAMES, _MOST_BRANCHES, _MOST_CHOICES, _MOST_REFS = 256, 64, 16, 8
_LONGEST_NAME = 256  # characters of a name that a pattern lists
_WORK = 100_000
"""Most steps for patterns and branches of a schema; after that, the rest stays as it is."""


class NotHeld(ValueError):
    """A schema that the compiler would mistake for a different one."""


class _Work:
    """The bounded number of steps for a schema, since they delay all requests."""

    def __init__(self) -> None:
        self._left = _WORK

    def allows(self, steps: int) -> bool:
        """Whether this many more steps are allowed; if so, they are counted."""
        self._left -= steps
        return self._left >= 0


def compilable(schema: Schema) -> Schema:
    """A schema for the same JSON, or for less of it if a bound exceeds 2^53, in a form that the
    compiler supports better. Unsupported parts stay. Raises NotHeld."""
    try:
        return _compiled(schema, None)
    except NotHeld:
        raise
    except (TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return schema  # not a schema; the compiler reports why


def relaxed(schema: Schema) -> tuple[Schema, list[str]]:
    """The schema without the parts that no grammar can enforce, and the places of those parts."""
    dropped: list[str] = []
    try:
        known = _compiled(schema, dropped)
        return _mapped(known, functools.partial(_relaxed, dropped=dropped)), dropped
    except (TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return schema, []


def _compiled(schema: Schema, dropped: list[str] | None) -> Schema:
    """dropped: receives the places of removed parts, which cannot be enforced; None raises
    NotHeld."""
    change = functools.partial(_compilable, root=schema, work=_Work(), dropped=dropped)
    return _mapped(schema, change)


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema in which every object that lists properties, and says nothing about others, allows
    no others. Parts of an object, as in `allOf`, stay as they are."""
    kept: set[str] = set()  # places of parts
    for _ in range(_MOST_REFS):
        before = len(kept)
        for where, each in _walk(schema):
            part = where in kept or bool(each.keys() & {"properties", "patternProperties", "allOf"})
            own = ("allOf.", "anyOf.", "oneOf.") if part else ("allOf.",)
            kept |= {_joined(where, name) for name, _ in _inner(each) if name.startswith(own)}
            if part and isinstance(each.get("$ref"), str):
                kept.add(".".join(_steps(each["$ref"])))
        if len(kept) == before:
            break

    def close(node: dict[str, Any], where: str) -> Schema:
        composed = node.keys() & {"$ref", "allOf", "anyOf", "oneOf", "additionalProperties"}
        if where in kept or composed or "properties" not in node:
            return node
        return {**node, "additionalProperties": False}

    found: Mapping[str, Any] = _mapped(schema, close)
    return found


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _inner(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _ONE:
        if isinstance(node.get(name), Mapping):
            yield name, node[name]
    for name in _SEVERAL:
        if isinstance(node.get(name), list):
            yield from ((f"{name}.{place}", each) for place, each in enumerate(node[name]))
    for name in _NAMED:
        if isinstance(node.get(name), Mapping):
            yield from ((f"{name}.{key}", each) for key, each in node[name].items())


def _walk(schema: Any, where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(schema, Mapping):
        yield where, schema
        for name, each in _inner(schema):
            yield from _walk(each, _joined(where, name))


def _mapped(
    schema: Any, change: Callable[[dict[str, Any], str], Schema], where: str = ""
) -> Schema:
    """The schema with every schema in it changed, the innermost first. change: gets a schema, whose
    inner ones are changed already, and its place."""
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for name in _ONE:
        if isinstance(node.get(name), Mapping):
            node[name] = _mapped(node[name], change, _joined(where, name))
    for name in _SEVERAL:
        if isinstance(node.get(name), list):
            node[name] = [
                _mapped(each, change, _joined(where, f"{name}.{place}"))
                for place, each in enumerate(node[name])
            ]
    for name in _NAMED:
        if isinstance(node.get(name), Mapping):
            node[name] = {
                key: _mapped(each, change, _joined(where, f"{name}.{key}"))
                for key, each in node[name].items()
            }
    return change(node, where)


def _named(root: Any, reference: Any) -> Any:
    """The schema that a reference within the schema means; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for name in _steps(reference):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _steps(reference: str) -> list[str]:
    """The steps of a JSON pointer after #."""
    parts = filter(None, reference[1:].split("/"))
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def _resolved(node: Any, root: Any) -> Any:
    for _ in range(_MOST_REFS):
        if not (
            isinstance(node, Mapping) and "$ref" in node and not node.keys() - _NOTES - {"$ref"}
        ):
            break
        node = _named(root, node["$ref"])
    return node


def _also(node: dict[str, Any], more: Schema) -> None:
    node["allOf"] = [*node.get("allOf", ()), more]


def _leave_out(
    node: dict[str, Any], names: Sequence[str], where: str, problem: str, dropped: list[str] | None
) -> None:
    """See `_compiled`."""
    places = [_joined(where, name) for name in names]
    if dropped is None:
        raise NotHeld(f"{', '.join(places)}: {problem}")
    for name in names:
        del node[name]
    dropped += places


def _compilable(
    node: dict[str, Any], where: str, *, root: Schema, work: _Work, dropped: list[str] | None
) -> Schema:
    if node.get("format") not in _FORMATS:
        node.pop("format", None)  # an annotation (JSON Schema 2020-12, validation, 7.2.1)
    if node.get("uniqueItems") is False or node.get("maxItems", 2) < 2:
        node.pop("uniqueItems", None)
    for name in ("const", "enum"):
        if _is_rounded(node.get(name)):
            problem = "has an integer beyond 2^53, which cannot be held exactly"
            _leave_out(node, [name], where, problem, dropped)
    _bound(node, where, dropped)
    _name_properties(node, root)
    _list_finite_names(node, work)
    for name, needed in node.pop("dependentRequired", {}).items():
        with_it = {"required": [name, *needed]}
        _also(node, {"anyOf": [{"properties": {name: False}}, with_it]})
    without = node.get("not")
    if isinstance(without, Mapping) and _only_requires(without) and "object" in _types(node):
        names = without["required"]
        if len(names) == 1 and node.get("type", "object") == "object":
            del node["not"]
            node["type"] = "object"
            node["properties"] = {**node.get("properties", {}), names[0]: False}
    if "unevaluatedProperties" in node and not node.keys() & {
        *("additionalProperties", "$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas")
    }:
        node["additionalProperties"] = node.pop("unevaluatedProperties")
    if "oneOf" in node:
        _choose(node, root, work)
    return node


def _relaxed(node: dict[str, Any], where: str, *, dropped: list[str]) -> Schema:
    gone = [name for name in _UNHELD if name in node]
    if _NO_REGULAR.search(node.get("pattern", "")):
        gone.append("pattern")
    listed, required = node.get("properties", {}).keys(), set(node.get("required", ()))
    if node.get("additionalProperties", True) is not False and listed - required:
        gone += [name for name in ("minProperties", "maxProperties") if name in node]
    for name in gone:
        del node[name]
    if "oneOf" in node:
        gone.append("oneOf")
        _also(node, {"anyOf": node.pop("oneOf")})
    dropped += (_joined(where, name) for name in gone)
    return node


# Bounds of numbers.


def _bound(node: dict[str, Any], where: str, dropped: list[str] | None) -> None:
    """Rewrites bounds that the compiler would round: exactly, or tighter."""
    found = {
        name: max(-_BEYOND, min(_BEYOND, node[name]))
        for name in (*_LOWER, *_UPPER)
        if isinstance(node.get(name), int | float) and not isinstance(node[name], bool)
    }
    if all(abs(bound) < _EXACT for bound in found.values()):
        return
    kinds = _types(node)
    integers = "integer" in kinds and "number" not in kinds
    last = _LAST if integers else _LAST_NUMBER
    for name, bound in list(found.items()):
        ahead = bound if name in _LOWER else -bound
        if ahead > last or (ahead == last and name.startswith("exclusive")):
            _leave_out(node, [name], where, f"no number beyond {last:g} can be held", dropped)
            del found[name]
    if integers:
        least, most = _integers(found)
        if least is not None:
            least = _exact(max(least, -_LAST), up=True)
        if most is not None:
            most = _exact(min(most, _LAST), up=False)
        if least is not None and most is not None and least > most:
            problem = "no integer within these bounds can be held exactly, beyond 2^53"
            return _leave_out(node, [*found], where, problem, dropped)
        for name in found:
            del node[name]
        found = {
            name: bound
            for name, bound in (("minimum", least), ("maximum", most))
            if bound is not None
        }
    for name, bound in found.items():
        if isinstance(bound, int):
            bound = _exact(bound, up=name in _LOWER)
        node[name] = max(-last, min(last, bound))
    # Without an upper bound, the compiler accepts no lower bound of 19 digits.
    if not found.keys() & {*_UPPER} and any(found.get(n, 0) >= _LONGEST for n in _LOWER):
        node["maximum"] = last
    if not found.keys() & {*_LOWER} and any(found.get(n, 0) <= -_LONGEST for n in _UPPER):
        node["minimum"] = -last


def _is_rounded(value: Any) -> bool:
    """Whether it contains integers that the compiler would round."""
    if isinstance(value, list):
        return any(map(_is_rounded, value))
    if isinstance(value, Mapping):
        return any(map(_is_rounded, value.values()))
    if not isinstance(value, int) or abs(value) <= _EXACT:
        return False
    return abs(value) > _LAST or int(float(value)) != value


def _integers(bounds: Mapping[str, float]) -> tuple[int | None, int | None]:
    """The least and the largest integer within them; None for no bound."""
    least = [math.ceil(b) for n, b in bounds.items() if n == "minimum"]
    least += [math.floor(b) + 1 for n, b in bounds.items() if n == "exclusiveMinimum"]
    most = [math.floor(b) for n, b in bounds.items() if n == "maximum"]
    most += [math.ceil(b) - 1 for n, b in bounds.items() if n == "exclusiveMaximum"]
    return max(least, default=None), min(most, default=None)


def _exact(bound: int, *, up: bool) -> int:
    """The nearest integer within the bound that is a float."""
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


def _types(node: Mapping[str, Any]) -> set[str]:
    """The types that it allows, if it lists them."""
    kind = node.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    return {"object", "array", "string", "number", "integer", "boolean", "null"}


# Names of properties.


def _name_properties(node: dict[str, Any], root: Schema) -> None:
    """`propertyNames` as properties, or as a pattern of them."""
    names = _resolved(node.get("propertyNames"), root)
    if names is True:
        del node["propertyNames"]
    if not isinstance(names, Mapping):
        return
    said = names.keys() - _NOTES
    if "string" not in _types(names):
        return
    said -= {"type"}
    listed, others = node.get("properties", {}), node.get("additionalProperties", True)
    if not said:
        del node["propertyNames"]
    elif "patternProperties" in node:
        return  # names are not matched against patterns of others here: that may take for ever
    elif said in ({"const"}, {"enum"}):
        known = [names["const"]] if "const" in names else names["enum"]
        known = dict.fromkeys(name for name in known if isinstance(name, str))
        kept = {name: each for name, each in listed.items() if name in known}
        if others is not False:
            kept |= {name: others for name in known if name not in kept}
        del node["propertyNames"]
        node.update(properties=kept, additionalProperties=False)
    elif not listed and (said == {"pattern"} or said <= {"minLength", "maxLength"}):
        most = names.get("maxLength", "")
        pattern = names.get("pattern", rf"^[\s\S]{{{names.get('minLength', 0)},{most}}}$")
        del node["propertyNames"]
        if others is not False:
            node["patternProperties"] = {pattern: others}
        node["additionalProperties"] = False


def _list_finite_names(node: dict[str, Any], work: _Work) -> None:
    """Replaces patterns that only a few names match by these names. After the last of them, the
    compiler requires a comma, after which nothing can come."""
    patterns = node.get("patternProperties")
    if not isinstance(patterns, Mapping):
        return
    listed, left = dict(node.get("properties", {})), {}
    for pattern, each in patterns.items():
        names = _finite(pattern, work)
        if names is None:
            left[pattern] = each
            continue
        for name in names:
            listed[name] = {"allOf": [listed[name], each]} if name in listed else each
    if len(left) < len(patterns):
        node.update(properties=listed, patternProperties=left)
        if not left:
            del node["patternProperties"]


_BEGIN, _END = "\x02", "\x03"  # of a text, inside a text


def _finite(pattern: str, work: _Work) -> list[str] | None:
    """All texts in which the pattern is found, sorted; None if there may be more than a few."""
    parser: Any = importlib.import_module("re._parser")
    if not work.allows(len(pattern)):
        return None
    try:
        found = _texts(parser.parse(pattern), work)
    except (re.error, RecursionError, OverflowError):
        return None
    if found is None or not all(
        text.startswith(_BEGIN)
        and text.endswith(_END)
        and not re.search("[\x02\x03]", text.strip(_BEGIN + _END))
        for text in found
    ):
        return None
    return sorted({text.strip(_BEGIN + _END) for text in found})


def _texts(parsed: Iterable[tuple[Any, Any]], work: _Work) -> set[str] | None:
    """Texts that a parsed expression matches; None for too many, or if unknown."""
    made: set[str] | None = {""}
    for kind, value in parsed:
        made = _followed(made, _matched(str(kind), value, work), work)
        if made is None:
            break
    return made


def _followed(ones: set[str] | None, others: set[str] | None, work: _Work) -> set[str] | None:
    """Each of the first texts followed by each of the others."""
    if ones is None or others is None:
        return None
    count = len(ones) * len(others)
    longest = sum(max(map(len, each), default=0) for each in (ones, others))
    if count > _MOST_NAMES or longest > _LONGEST_NAME or not work.allows(count + longest + 1):
        return None
    return {one + other for one in ones for other in others}


def _matched(kind: str, value: Any, work: _Work) -> set[str] | None:
    match kind:
        case "LITERAL":
            return {chr(value)}
        case "AT":
            return {"AT_BEGINNING": {_BEGIN}, "AT_END": {_END}}.get(str(value))
        case "IN":
            parts = [_of_class(str(each), inner) for each, inner in value]
        case "BRANCH":
            parts = [_texts(each, work) for each in value[1]]
        case "SUBPATTERN" if not (value[1] or value[2]):
            return _texts(value[3], work)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, largest, inner = int(value[0]), int(value[1]), _texts(value[2], work)
            if largest > _MOST_NAMES:
                return None
            parts, made = [], _texts((), work)
            for count in range(largest + 1):
                parts += [made] if count >= least else []
                made = _followed(made, inner, work)
        case _:
            return None
    known = [part for part in parts if part is not None]
    found = set().union(*known)
    return found if len(known) == len(parts) and len(found) <= _MOST_NAMES else None


def _of_class(kind: str, value: Any) -> set[str] | None:
    if kind == "LITERAL":
        return {chr(value)}
    if kind == "RANGE" and value[1] - value[0] < _MOST_NAMES:
        return set(map(chr, range(value[0], value[1] + 1)))
    return set("0123456789") if str(value) == "CATEGORY_DIGIT" else None


# Exactly one of several.


def _only_requires(node: Any) -> bool:
    return (
        isinstance(node, Mapping)
        and "required" in node
        and not node.keys() - _NOTES - {"required", "type"}
        and node.get("type", "object") == "object"
    )


def _choose(node: dict[str, Any], root: Schema, work: _Work) -> None:
    """Turns `oneOf` into `anyOf` if no JSON is valid for two of the schemas."""
    branches: list[Any] = node["oneOf"]
    known = [_resolved(each, root) for each in branches]
    if not all(_disjoint(a, b, root, work) for a, b in itertools.combinations(known, 2)):
        if not all(map(_only_requires, known)) or len(known) > _MOST_CHOICES:
            return
        branches = list(_requires_one([each["required"] for each in known]))
        if not branches or len(branches) > _MOST_BRANCHES:
            return
    del node["oneOf"]
    if "anyOf" in node:
        _also(node, {"anyOf": branches})
    else:
        node["anyOf"] = branches


def _requires_one(wanted: Sequence[Sequence[str]]) -> Iterator[Schema]:
    """Objects that have all names of exactly one of the lists."""
    for place, own in enumerate(wanted):
        there = set(own)
        missing = [
            [name for name in other if name not in there]
            for other in (*wanted[:place], *wanted[place + 1 :])
        ]
        for absent in itertools.islice(itertools.product(*missing), _MOST_BRANCHES + 1):
            without = dict.fromkeys(absent, False)
            yield {"type": "object", "properties": without, "required": list(own)}


def _disjoint(one: Any, other: Any, root: Schema, work: _Work, depth: int = 3) -> bool:
    """Whether certainly no JSON is valid for both."""
    one, other = _resolved(one, root), _resolved(other, root)
    if one is False or other is False:
        return True
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)) or not depth:
        return False
    listed = sum(len(each.get("enum", ())) + 1 for each in (one, other))
    if not work.allows(listed * listed + len(one.get("required", ())) + len(other)):
        return False
    for each, against in ((one, other), (other, one)):
        values = _values(each)
        if values is not None and all(_impossible(value, against) for value in values):
            return True
    kinds, others = _types(one), _types(other)
    if {"number", "integer"} & kinds and {"number", "integer"} & others:
        return False
    if not kinds & others:
        return True
    if kinds & others != {"object"}:
        return False
    return any(_never_both(*pair, root, work, depth) for pair in ((one, other), (other, one)))


def _never_both(
    one: Mapping[str, Any], other: Mapping[str, Any], root: Schema, work: _Work, depth: int
) -> bool:
    """For objects: whether a property required by one schema has other values, or is missing, in
    the other."""
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    for name in one.get("required", ()):
        if name in theirs:
            if _disjoint(mine.get(name, True), theirs[name], root, work, depth - 1):
                return True
        elif other.get("additionalProperties") is False and not other.get("patternProperties"):
            return True
    return False


def _values(node: Mapping[str, Any]) -> list[Any] | None:
    """All values that it allows, if they are listed."""
    if "const" in node:
        return [node["const"]]
    found = node.get("enum")
    return found if isinstance(found, list) else None


def _impossible(value: Any, node: Mapping[str, Any]) -> bool:
    """Whether a value is certainly invalid, judging by types and lists of values."""
    values = _values(node)
    if values is not None and not any(_same(value, each) for each in values):
        return True
    names = {
        *(["boolean"] if isinstance(value, bool) else []),
        *(["integer", "number"] if isinstance(value, int) and not isinstance(value, bool) else []),
        *(["number", "integer"] if isinstance(value, float) else []),
        *(["string"] if isinstance(value, str) else []),
        *(["null"] if value is None else []),
        *(["array"] if isinstance(value, list) else []),
        *(["object"] if isinstance(value, Mapping) else []),
    }
    return not names & _types(node)


def _same(one: Any, other: Any) -> bool:
    """Equality in JSON, where true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
