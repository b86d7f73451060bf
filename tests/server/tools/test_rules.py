"""Texts that grammars with calls allow, and those that they do not."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers

from jaxserve.config import Config, ConfigError
from jaxserve.engine.text.grammars import Grammars
from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest
from jaxserve.server.http.options import http_settings
from jaxserve.server.tools.call_grammar import call_grammar
from jaxserve.server.tools.calls import Call, Tool, flat, whole
from jaxserve.server.tools.registry import LeadingFormat, MarkedFormat, find_format, formats
from jaxserve.server.tools.rules import schema_of

BOX = Path(__file__).parents[3] / "jaxserve" / "assets" / "tiny-stories" / "tokenizer.json"
EOS = 2
NAMES = sorted(formats())
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "more": {"$ref": "#/$defs/more"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"more": {"type": "array", "items": {"$ref": "#/$defs/more"}, "maxItems": 2}},
}
TOOLS = (Tool("weather", "", SCHEMA, strict=True), Tool("now"))
GOOD = [
    {"city": "Rome", "days": 2},
    {"city": "", "unit": "F", "days": 9},
    {"city": "12", "days": 1, "more": [[], [[]]]},
]
BAD: list[dict[str, Any]] = [
    {},
    {"city": "Rome"},
    {"city": "Rome", "days": 10},
    {"city": "Rome", "days": "two"},
    {"city": "far too long", "days": 2},
    {"city": "Rome", "unit": "K", "days": 2},
    {"city": "Rome", "days": 2, "x": 1},
    {"city": "Rome", "days": 2, "more": [1]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_file(str(BOX))


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(BOX.read_text(), tokenizer.get_vocab_size(), [EOS])


def accepts(grammars: Grammars, tokenizer: Any, grammar: Grammar, text: str) -> bool:
    """Whether it may be all of a text."""
    matcher = grammars.compile(grammar).matcher(ignore_eos=False)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    for place, token in enumerate(tokens, 1):
        mask = matcher.mask()
        if mask is None or not int(mask[token // 32]) >> token % 32 & 1:
            return False
        if matcher.feed(token):
            return place == len(tokens)
    mask = matcher.mask()
    return mask is not None and bool(int(mask[EOS // 32]) >> EOS % 32 & 1)


def held(name: str, source: str = "", tools: Sequence[Tool] = TOOLS, **how: bool) -> Grammar:
    how = {"forced": True, "parallel": True, **how}
    return call_grammar(find_format(source, name), tools, special={}, **how)


def written(name: str, *arguments: dict[str, Any], source: str = "") -> str:
    calls = [Call("weather", json.dumps(each, ensure_ascii=False)) for each in arguments]
    return find_format(source, name).written(calls)


FORMS = [*((name, "") for name in NAMES), ("mistral", "[ARGS]")]
FREE = [form for form in FORMS if formats()[form[0]].holds_some]


@pytest.mark.parametrize(("name", "source"), FORMS)
def test_forced_text_is_calls(grammars: Grammars, tokenizer: Any, name: str, source: str) -> None:
    several, one = held(name, source), held(name, source, parallel=False)
    for arguments in GOOD:
        text = written(name, arguments, source=source)
        assert accepts(grammars, tokenizer, several, text), text
        assert accepts(grammars, tokenizer, one, text), text
    for arguments in BAD:
        text = written(name, arguments, source=source)
        assert not accepts(grammars, tokenizer, several, text), text
    both = written(name, *GOOD[:2], source=source)
    assert accepts(grammars, tokenizer, several, both)
    assert not accepts(grammars, tokenizer, one, both)
    many = written(name, *GOOD[:1] * 17, source=source)
    assert not accepts(grammars, tokenizer, several, many)
    for text in ("", "Sure! " + both, both + " Done.", "It is fine."):
        assert not accepts(grammars, tokenizer, several, text), text


@pytest.mark.parametrize("forced", [True, False])
def test_objects_are_closed_where_the_schema_says_nothing(
    grammars: Grammars, tokenizer: Any, forced: bool
) -> None:
    """As OpenAI has it for strict tools. It is so for forced ones, too."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}}
    parameters = {"type": "object", "properties": {"place": place, "more": {"type": "object"}}}
    tools = [Tool("weather", "", parameters, strict=not forced)]
    grammar = held("hermes", tools=tools, forced=forced)
    for arguments, fine in (
        ({"place": {"city": "Rome"}, "more": {"x": 1}}, True),
        ({"place": {"city": "Rome", "x": 1}}, False),
        ({"place": {}, "x": 1}, False),
    ):
        assert accepts(grammars, tokenizer, grammar, written("hermes", arguments)) is fine
    loose = [Tool("weather", "", {**parameters, "additionalProperties": {"type": "integer"}})]
    text = written("hermes", {"place": {}, "x": 1})
    assert accepts(grammars, tokenizer, held("hermes", tools=loose), text)


@pytest.mark.parametrize(("name", "source"), FREE)
def test_strict_tools_leave_other_text_free(
    grammars: Grammars, tokenizer: Any, name: str, source: str
) -> None:
    free = held(name, source, forced=False)
    for text in ("It is fine.", " a < b\n", "", written(name, GOOD[0], source=source)):
        assert accepts(grammars, tokenizer, free, text), text
    for arguments in BAD:
        assert not accepts(grammars, tokenizer, free, written(name, arguments, source=source))
    # The other tool is not strict.
    text = find_format(source, name).written([Call("now", '{"a": "b"}')])
    assert accepts(grammars, tokenizer, free, text)
    assert not accepts(grammars, tokenizer, held(name, source), text)
    if isinstance(find_format(source, name), MarkedFormat):
        text = f"Let me see. {written(name, GOOD[0], source=source)}"
        assert accepts(grammars, tokenizer, free, text)


@pytest.mark.parametrize(
    ("name", "source", "forced"),
    [*((*form, True) for form in FORMS), *((*form, False) for form in FREE)],
)
def test_what_is_allowed_is_parsed(
    grammars: Grammars, tokenizer: Any, name: str, source: str, forced: bool
) -> None:
    """Walks at random, and as far as the text may end."""
    tools = [TOOLS[0], Tool("now", strict=True)]
    form = find_format(source, name)
    grammar = held(name, source, tools, forced=forced, parallel=False)
    for seed in range(6):
        matcher = grammars.compile(grammar).matcher(ignore_eos=False)
        begin = form.trigger if isinstance(form, MarkedFormat) and not forced else ""
        tokens: list[int] = tokenizer.encode(begin, add_special_tokens=False).ids
        for token in tokens:
            matcher.feed(token)
        for step in itertools.count():
            mask = matcher.mask()
            assert mask is not None
            bits = [t for t in range(32 * len(mask)) if int(mask[t // 32]) >> t % 32 & 1]
            if EOS in bits and step and (step > 40 or len(bits) == 1 or not forced):
                break
            bits = [bit for bit in bits if bit != EOS]
            if not forced and isinstance(form, LeadingFormat) and step == 0:
                opener = tokenizer.encode(form.openers[1], add_special_tokens=False).ids[0]
                bits = [opener]
            # Short texts: what ends something, where it may.
            closing = [t for t in bits if tokenizer.decode([t]) in ("}", "]", ")", '"', "\n")]
            bits = closing if closing and step > 40 else bits
            token = bits[(seed * 7919 + step * 104729) % len(bits)]
            tokens.append(token)
            if matcher.feed(token):
                break
            assert step < 600, tokenizer.decode(tokens)
        text = tokenizer.decode(tokens)
        parser = form.parser(TOOLS)
        said = whole([*parser.feed(text), *parser.finish()])
        content, calls = said.content, said.calls
        assert content == "" and len(calls) == 1, text
        schema = schema_of({tool.name: tool for tool in tools}[calls[0].name])
        jsonschema.validate(json.loads(calls[0].arguments), schema)


@pytest.mark.parametrize(("name", "source"), FORMS)
def test_calls_or_else_what_the_text_is_to_be(
    grammars: Grammars, tokenizer: Any, name: str, source: str
) -> None:
    form, how = find_format(source, name), {"forced": False, "parallel": True}
    kinds = (
        (Grammar.json_schema({"type": "integer"}), ["12"], ["a", "{}"]),
        (Grammar.json_schema({"type": "array"}), ['["weather"]', "[]"], ["a", "{}"]),
        (Grammar.json_schema("true"), ['"a"', '[{"name": 1}]'], ["a"]),
        (Grammar.json_object(), ['{"a": 1}', '{"name": 1}', "{}"], ["1", "Well. {}"]),
        (Grammar.choice(["yes", "no/"]), ["yes", "no/"], ["{}", "y"]),
    )
    for otherwise, good, bad in kinds:
        if not form.holds_some:
            with pytest.raises(InvalidRequest, match=f"{name}, only calls that are required"):
                call_grammar(form, [Tool("f")], special={}, otherwise=otherwise, **how)
            continue
        if form.plain_json and otherwise.kind is not GrammarKind.CHOICE:
            with pytest.raises(InvalidRequest, match=f"{name}, calls are plain JSON"):
                call_grammar(form, TOOLS, special={}, otherwise=otherwise, **how)
            continue
        grammar = call_grammar(form, TOOLS, special={}, otherwise=otherwise, **how)
        calls = written(name, *GOOD[:2], source=source)
        for text in (*good, calls):
            assert accepts(grammars, tokenizer, grammar, text), text
        for text in (*bad, "", f"Well. {calls}", calls + good[0], calls + " Done."):
            assert not accepts(grammars, tokenizer, grammar, text), text
        for arguments in BAD:
            text = written(name, arguments, source=source)
            assert not accepts(grammars, tokenizer, grammar, text), text


@pytest.mark.parametrize("name", NAMES)
def test_white_space_is_bounded(grammars: Grammars, tokenizer: Any, name: str) -> None:
    tools = (Tool("f", parameters={"properties": {"a": {"type": "array"}}, "required": ["a"]}),)
    grammar = held(name, tools=tools)
    text = find_format("", name).written([Call("f", '{"a": [1]}')]).replace("[1]", "[@1]")
    assert accepts(grammars, tokenizer, grammar, text.replace("@", " " * 8))
    assert not accepts(grammars, tokenizer, grammar, text.replace("@", " " * 9))


def test_everywhere_else_too(grammars: Grammars, tokenizer: Any) -> None:
    for grammar in (Grammar.json_object(), Grammar.json_schema({"type": "object"})):
        for blank in (" ", "\n", "\t"):
            assert accepts(grammars, tokenizer, grammar, "{" + blank * 8 + "}")
            assert not accepts(grammars, tokenizer, grammar, "{" + blank * 9 + "}")


def test_harmony_holds_only_calls_that_are_required() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\.1\.function\.strict: in .*harmony, only"):
        held("harmony", tools=[Tool("now"), Tool("f", strict=True)], forced=False)


def test_markers_that_are_special_tokens(grammars: Grammars) -> None:
    form = find_format("", "mistral")
    for forced in (True, False):
        grammar = call_grammar(
            form, TOOLS, forced=forced, parallel=True, special={"[TOOL_CALLS]": 1}
        )
        matcher = grammars.compile(grammar).matcher(ignore_eos=False)
        mask = matcher.mask()
        assert mask is not None and int(mask[0]) >> 1 & 1
        assert (int(mask[0]) >> EOS & 1) == (not forced)
        matcher.feed(1)
        assert matcher.mask() is not None


@pytest.mark.parametrize(
    ("name", "schema", "where"),
    [
        ("qwen", {"properties": {"a": {"type": "string", "pattern": "a"}}}, "properties.a"),
        ("qwen", {"properties": {"a>": {}}}, "properties.a>"),
        ("qwen", {"anyOf": [{}]}, ""),
        ("pythonic", {"properties": {"a b": {}}}, "properties.a b"),
        ("pythonic", {"properties": {"class": {}}}, "properties.class"),
        ("pythonic", {"$ref": "#/$defs/a"}, ""),
    ],
)
def test_what_a_format_cannot_hold(name: str, schema: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        held(name, tools=[Tool("now"), Tool("f", parameters=schema)])
    expected = ".".join(filter(None, ("tools.1.function.parameters", where)))
    assert error.value.field_name == expected


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/Place"}},
    "required": ["city"],
    "additionalProperties": False,
}
AROUND: list[dict[str, Any]] = [
    {"$defs": {"Place": PLACE}, "$ref": "#/$defs/Place"},  # as pydantic has a model within itself
    {"$defs": {"Place": PLACE}, "allOf": [{"$ref": "#/$defs/Place"}], "title": "Place"},
    {
        "$defs": {"Place": {**PLACE, "additionalProperties": True}},
        "allOf": [{"$ref": "#/$defs/Place"}, {"properties": {"more": {"type": "integer"}}}],
    },
]


@pytest.mark.parametrize("schema", AROUND)
@pytest.mark.parametrize("name", NAMES)
def test_parameters_may_be_said_elsewhere(
    grammars: Grammars, tokenizer: Any, name: str, schema: dict[str, Any]
) -> None:
    form, tools = find_format("", name), [Tool("f", parameters=schema, strict=True)]
    grammar = held(name, tools=tools)
    good = {"city": "12", "near": {"city": "Rome"}}  # text stays text
    text = form.written([Call("f", json.dumps(good))])
    assert accepts(grammars, tokenizer, grammar, text), text
    parser = form.parser(tools)
    (call,) = whole([*parser.feed(text), *parser.finish()]).calls
    assert json.loads(call.arguments) == good
    for bad in ({}, {"city": 1}, {"city": "Rome", "near": {}}):
        if name == "qwen" and bad == {"city": 1}:
            continue  # as it writes it, it is text
        text = form.written([Call("f", json.dumps(bad))])
        assert not accepts(grammars, tokenizer, grammar, text), text


STRING, NULL = {"type": "string"}, {"type": "null"}
SIZE = {"enum": ["S", "L"]}


@pytest.mark.parametrize(
    ("schema", "texts", "bad"),
    [
        ({"anyOf": [STRING, NULL]}, {"a": "a", "3.10": "3.10", "null": None}, []),
        ({"$ref": "#/$defs/Zip"}, {"00": "00", "12": "12"}, ["0", "000"]),
        ({"anyOf": [{"const": "1"}, {"const": "2"}]}, {"1": "1"}, ["3", '"1"']),
        ({"anyOf": [SIZE, NULL]}, {'"S"': "S", "null": None}, ["S", "M"]),
        ({"type": ["string", "integer"], "maxLength": 2}, {"123": 123, '"12"': "12"}, ["12a"]),
    ],
)
def test_what_qwen_is_held_to_is_what_it_is_read_as(
    grammars: Grammars, tokenizer: Any, schema: Any, texts: dict[str, Any], bad: list[str]
) -> None:
    defs = {"Zip": {"type": "string", "minLength": 2, "maxLength": 2}}
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": defs}
    tools = [Tool("f", parameters={**parameters, "additionalProperties": False}, strict=True)]
    grammar = held("qwen", tools=tools)
    written = (
        "<tool_call>\n<function=f>\n<parameter=v>\n{}\n</parameter>\n</function>\n</tool_call>"
    )
    for text in bad:
        assert not accepts(grammars, tokenizer, grammar, written.format(text)), text
    for text, value in texts.items():
        assert accepts(grammars, tokenizer, grammar, written.format(text)), text
        parser = find_format("", "qwen").parser(tools)
        (call,) = whole([*parser.feed(written.format(text)), *parser.finish()]).calls
        assert json.loads(call.arguments) == {"v": value}
        jsonschema.validate({"v": value}, tools[0].parameters)


CIRCLE: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "schema",
    [
        CIRCLE,
        {"$ref": "https://example.com/a"},
        {"$ref": "#"},
        {"$ref": "#/$defs/a/default", "$defs": {"a": {"default": {"properties": 5}}}},
        {"allOf": [True]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"a": {}}}]},
        {"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, AROUND[0]["$defs"]]},
        {
            "allOf": [
                {"properties": {"a": {}}, "additionalProperties": False},
                {"properties": {"b": {}}},
            ]
        },
    ],
)
def test_what_is_around_parameters_and_stays(schema: dict[str, Any]) -> None:
    assert flat(schema) is schema


SOURCES = [
    ("", "hermes"),
    ("{{ tools }} <tool_call>{}</tool_call>", "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen"),
    ("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]", "mistral"),
    ("{{ '<|python_tag|>' }}", "llama3"),
    ("<|start|>assistant<|channel|>commentary to=", "harmony"),
    ("[func_name1(params_name1=params_value1)]", "pythonic"),
]


@pytest.mark.parametrize(("source", "name"), SOURCES)
def test_formats_are_found_by_the_template(source: str, name: str) -> None:
    assert find_format(source).name == name
    assert find_format(source, "auto").name == name
    assert find_format(source, "json").name == "json"


def test_a_format_may_be_given() -> None:
    settings = http_settings(Config().with_fields(server__tool_format="mistral", model__path=""))
    assert settings is not None and settings.template.tool_format.name == "mistral"
    with pytest.raises(ConfigError, match=r"server\.tool_format: must be auto, harmony, .*'morse'"):
        http_settings(Config().with_fields(server__tool_format="morse", model__path=""))


def test_ids_are_as_templates_demand_them() -> None:
    for name in NAMES:
        ids = {find_format("", name).id_of(bytes([i] * 12)) for i in range(20)}
        assert len(ids) == 20
        for each in ids:
            assert len(each) == 9 and each.isalnum() if name == "mistral" else "call_" in each
