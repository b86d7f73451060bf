"""Schemas as pydantic, zod and OpenAPI write them are held to, and no text ends half-way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from jaxserve.engine.text import json_schemas
from jaxserve.engine.text.grammars import Grammars
from jaxserve.engine.text.json_schemas import closed, compilable, relaxed
from jaxserve.sched.request import Grammar, InvalidRequest
from tests.engine.harness import BOX
from tests.engine.text.tokenizers_for_tests import allowed

EOS = 2
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
EXACT = 1 << 53


def closed_object(properties: Any, required: Any = (), **more: Any) -> dict[str, Any]:
    kind = {"type": "object", "properties": properties, "required": list(required)}
    return {**kind, "additionalProperties": False, **more}


def tagged(kind: str) -> dict[str, Any]:
    return closed_object({"kind": {"const": kind}, kind: DIGIT}, ["kind"])


BOTH = {"a": DIGIT, "b": DIGIT}
# Schema, what is valid, what is not.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "a format that is a note": ({"type": "string", "format": "uuid4"}, ["x"], [1]),
    "of numbers": ({"type": ["integer", "null"], "format": "int64"}, [5, None], ["x"]),
    "a property called format": (
        closed_object({"format": {"const": "odd"}}, ["format"]),
        [{"format": "odd"}],
        [{}],
    ),
    "one that is held": ({"type": "string", "format": "date"}, ["2024-02-29"], ["x"]),
    "names are strings": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": DIGIT},
        [{}, {"x": 1}],
        [{"x": "y"}],
    ),
    "one name": (
        {"type": "object", "propertyNames": {"const": "a"}, "additionalProperties": DIGIT},
        [{}, {"a": 1}],
        [{"b": 1}, {"a": "x"}],
    ),
    "a few names, by reference": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/name"},
            "additionalProperties": DIGIT,
            "properties": {"b": {"type": "boolean"}, "z": True},
            "$defs": {"name": {"enum": ["a", "b"], "type": "string"}},
        },
        [{}, {"b": True, "a": 1}],
        [{"b": 1}, {"z": 1}],
    ),
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": DIGIT},
        [{}, {"ab": 1}],
        [{"A": 1}, {"ab": "x"}],
    ),
    "names by their length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}},
        [{}, {"ab": 1}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "one of two names": (
        closed_object(BOTH, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    "one of overlapping names": (
        closed_object(
            {**BOTH, "c": DIGIT},
            oneOf=[{"required": ["a", "b"]}, {"required": ["b", "c"]}, {"required": ["a", "c"]}],
        ),
        [{"a": 1, "b": 2}, {"b": 1, "c": 2}],
        [{"a": 1}, {"a": 1, "b": 2, "c": 3}],
    ),
    "one or nothing, in an open object": (
        {
            "type": "object",
            "properties": BOTH,
            "oneOf": [
                {"required": ["a"], "not": {"required": ["b"]}},
                {"required": ["b"], "not": {"required": ["a"]}},
            ],
        },
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 2}],
    ),
    "a union by a tag": (
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {"cat": tagged("cat"), "dog": tagged("dog")},
        },
        [{"kind": "cat", "cat": 1}, {"kind": "dog"}],
        [{"kind": "cat", "dog": 1}, {}],
    ),
    "a union of types": (
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "null"}, DIGIT]},
        ["x", None, 3],
        [10, True],
    ),
    "true is not 1": ({"oneOf": [{"const": True}, {"const": 1}]}, [True, 1], [0, False]),
    "one needs another": (
        closed_object(BOTH, dependentRequired={"a": ["b"]}),
        [{}, {"b": 1}, {"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    "nothing unevaluated": (
        {"type": "object", "properties": BOTH, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"c": 1}],
    ),
    "no two": (
        {"type": "array", "items": DIGIT, "uniqueItems": True, "maxItems": 1},
        [[1]],
        [[1, 1]],
    ),
    "64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, -5, 2**62],
        [2**63, -(2**63) - 1, 2**70],
    ),
    "64 bits without a sign": (
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        [0, 2**62],
        [-1, 2**64],
    ),
    "bounds between floats": (
        {"type": "integer", "minimum": EXACT + 1, "exclusiveMaximum": EXACT + 4},
        [EXACT + 2],
        [EXACT, EXACT + 4],
    ),
    "a bound of 19 digits": ({"type": "integer", "minimum": 2 * 10**18}, [3 * 10**18], [10**18]),
    "of a number": ({"maximum": -2e18}, [-3 * 10**18, "x"], [-(10**18)]),
    "a number's bound that is no float": (
        {"type": "number", "minimum": EXACT + 1, "maximum": 1e300},
        [EXACT + 2],
        [EXACT],
    ),
    "a bound above": ({"type": "integer", "exclusiveMinimum": EXACT}, [EXACT + 2], [EXACT, 0]),
    "floats of 32 bits": (
        {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
        [0, -1.5],
        ["x"],
    ),
    "a pattern of one listed name": (
        closed_object({"score": DIGIT}, ["score"], patternProperties={"^score$": {"minimum": 3}}),
        [{"score": 4}],
        [{"score": 2}, {"score": 4, "x": 1}],
    ),
    "of all": (
        closed_object(BOTH, patternProperties={"^[ab]$": DIGIT}),
        [{}, {"b": 1}],
        [{"c": 1}],
    ),
    "of a name that is not listed": (
        closed_object(BOTH, ["a"], patternProperties={"^(a|bc?)$|^d{2}$": {"maximum": 5}}),
        [{"a": 1, "bc": 5}, {"a": 1, "dd": 2}],
        [{"a": 6}, {"a": 1, "bc": 6}, {"a": 1, "d": 1}],
    ),
    "of a part of names": (
        closed_object({"a": DIGIT}, patternProperties={"^x-": DIGIT, "^a$": {"maximum": 5}}),
        [{"a": 5, "x-y": 1}],
        [{"a": 6}, {"y": 1}],
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars((BOX / "tokenizer.json").read_text(), 1536, (EOS,))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(BOX / "tokenizer.json"))


@pytest.mark.parametrize("case", CASES)
def test_text_is_valid_and_does_not_end_half_way(
    case: str, grammars: Grammars, tokenizer: Any
) -> None:
    schema, fine, wrong = CASES[case]
    made = grammars.compile(Grammar.json_schema(schema))
    draw = random.Random(case)
    for _ in range(25):
        matcher, tokens = made.matcher(ignore_eos=False), list[int]()
        for _ in range(60):
            mask = matcher.mask()
            if mask is None:
                assert not matcher.problem, (tokenizer.decode(tokens), matcher.problem)
                break
            choice = allowed(mask)
            token = EOS if EOS in choice else draw.choice(choice)
            if token == EOS:
                break
            tokens.append(token)
            if matcher.feed(token):
                break
        else:
            continue
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema)
    for valid, value in [*((True, each) for each in fine), *((False, each) for each in wrong)]:
        text = tokenizer.encode(json.dumps(value), add_special_tokens=False).ids
        state = made._matcher.deep_copy()
        fits = state.try_consume_tokens(text) == len(text) and state.is_accepting()
        assert fits is valid, value


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"const": EXACT + 1}, "const: has an integer beyond"),
        (closed_object({"a": {"enum": [{"b": [EXACT + 1]}]}}), "enum: has an integer beyond"),
        ({"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 1}, "no integer within"),
        ({"minimum": 1e300, "maximum": 1e301}, "minimum: no number beyond"),
        ({"type": "integer", "exclusiveMaximum": -(10**400)}, "exclusiveMaximum: no number beyond"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "propertyNames"),
        ({"type": "object", "properties": 5}, "."),
        ({"oneOf": 5}, "."),
    ],
)
def test_what_cannot_be_held_is_refused(schema: Any, problem: str, grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        grammars.compile(Grammar.json_schema(schema))


def test_what_cannot_be_held_is_left_out_and_told(grammars: Grammars) -> None:
    schema = closed_object(
        {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "uniqueItems": {"type": "string", "pattern": "^(?!x)", "format": "odd"},
            "size": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "rest": {"type": "object", "properties": BOTH, "minProperties": 1},
            "id": {"type": "integer", "enum": [1, EXACT + 1]},
            "one": {"const": EXACT + 1},
            "far": {"type": "number", "minimum": 1e300, "maximum": 1e301},
            "low": {"type": "integer", "exclusiveMaximum": -(10**400), "minimum": -1e300},
            "between": {"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 1},
        },
        allOf=[{"if": {"required": ["tags"]}, "then": {"required": ["size"]}}],
    )
    left, places = relaxed(schema)
    assert sorted(places) == [
        "allOf.0.if",
        "allOf.0.then",
        "properties.between.maximum",
        "properties.between.minimum",
        "properties.far.minimum",
        "properties.id.enum",
        "properties.low.exclusiveMaximum",
        "properties.one.const",
        "properties.rest.minProperties",
        "properties.size.oneOf",
        "properties.tags.uniqueItems",
        "properties.uniqueItems.pattern",
    ]
    grammars.compile(Grammar.json_schema(left))
    plain = closed_object(BOTH, ["a"])
    assert relaxed(plain) == (plain, [])


def test_objects_are_closed_where_they_say_nothing() -> None:
    inner = {"type": "object", "properties": {"x": DIGIT}}
    schema = {
        "type": "object",
        "properties": {
            "one": inner,
            "open": {**inner, "additionalProperties": DIGIT},
            "any": {"type": "object"},
            "list": {"type": "array", "items": {"anyOf": [inner, {"type": "null"}]}},
            "named": {"$ref": "#/$defs/alone"},
            "parts": {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"y": DIGIT}}]},
            "either": {"properties": {"z": DIGIT}, "anyOf": [inner, {"required": ["z"]}]},
        },
        "$defs": {"alone": inner, "base": {**inner}},
    }
    shut = {**inner, "additionalProperties": False}
    found = closed(schema)
    properties: Any = schema["properties"]
    assert found == {
        **schema,
        "additionalProperties": False,
        "properties": {
            **properties,
            "one": shut,
            "list": {"type": "array", "items": {"anyOf": [shut, {"type": "null"}]}},
        },
        "$defs": {"alone": shut, "base": inner},
    }


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    allows = json_schemas._Work.allows
    monkeypatch.setattr(
        json_schemas._Work,
        "allows",
        lambda work, count: (fine := allows(work, count)) and not steps.append(count) and fine,
    )
    nested = "a?"
    for _ in range(6):
        nested = f"({nested}){{0,60}}"
    for schema in (
        {"patternProperties": {f"^{nested}{n}$": True for n in range(900)}},
        {"patternProperties": {f"^(a+)+{n}$": True for n in range(900)}},
        {"oneOf": [{"enum": [f"{n}.{m}" for m in range(30)]} for n in range(300)]},
        {"oneOf": [{"required": [f"{n}{m}" for m in range(9)]} for n in range(16)]},
    ):
        steps.clear()
        compilable(schema)
        assert sum(steps) <= json_schemas._WORK


@pytest.mark.parametrize("times", ["{200}", "{256}", "{256}){256}", "{256}){20}"])
def test_a_pattern_of_few_long_names_costs_little(times: str) -> None:
    """One name, of megabytes: it is not written out, and the pattern stays."""
    pattern = "^" + "(" * (2 + times.count(")")) + "a{256}){256})" + times + "$"
    schema = {"type": "object", "patternProperties": {pattern: {"type": "string"}}}
    assert pattern in json.dumps(compilable(schema))
