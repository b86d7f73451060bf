"""What texts of each format are, however they are cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.server.tools.calls import Arguments, Call, CallBegin, Content, Tool, whole
from jaxserve.server.tools.parser import TextParser
from jaxserve.server.tools.registry import find_format, formats

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = (Tool("weather", "How it is.", CITY), Tool("now"), Tool("a-b_1", parameters=CITY))
NAMES = sorted(formats())
HERE = {"city": "Rome", "days": 2}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
QWEN = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
OBJECT = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
LLAMA = OBJECT.replace("arguments", "parameters")


def parsed(
    name: str, text: str, cuts: Sequence[int] = (), most: int | None = None, **how: bool
) -> tuple[str, list[Call]]:
    parser = find_format("", name).parser(TOOLS, most, **how)
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [parser.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    said = whole([*itertools.chain(*pieces), *parser.finish()])
    return said.content, said.calls


def test_calls_that_are_alone() -> None:
    for name in NAMES:
        form = find_format("", name)
        text = form.written([Call("weather", json.dumps(HERE))] * 2)
        for before, calls in (("", 2), (" ", 2), ("A ", 0), ('{"a": "', 0)):
            for size in (1, 7, 500):
                parser = form.parser(TOOLS, alone=True)
                whole_text = before + text
                cut = [whole_text[at : at + size] for at in range(0, len(whole_text), size)]
                pieces = [piece for each in cut for piece in parser.feed(each)]
                said = whole([*pieces, *parser.finish()])
                content, found = said.content, said.calls
                assert len(found) == calls, whole_text
                assert content == ("" if calls else whole_text)


def said(name: str, text: str, **how: Any) -> tuple[str, list[Any]]:
    content, calls = parsed(name, text, **how)
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


ONE = [("weather", HERE)]
TO = "<|channel|>commentary to=functions.weather"
ROLE = "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
HARMONY = f'{TO} <|constrain|>json<|message|>{{"city": "Rome", "days": 2}}'
NOW = [("now", {})]
TO_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
NOTHING: list[tuple[str, str, str, list[Any]]] = [
    *(
        (name, before + f'{{"name": "now", "{key}": {given}}}' + after, "", NOW)
        for name, key, before, after in (
            ("hermes", "arguments", "<tool_call>", "</tool_call>"),
            ("llama3", "parameters", "", ""),
            ("llama3", "parameters", "<|python_tag|>", ""),
            ("json", "arguments", "", ""),
            ("mistral", "arguments", "[TOOL_CALLS][", "]"),
        )
        for given in ("null", '""', '" "', '"null"', '"{}"')
    ),
    *(("harmony", f"{TO_NOW}{given}", "", NOW) for given in ("null", '""', " null<|call|>")),
    ("harmony", f"{TO_NOW}<|call|>", "", NOW),
    ("harmony", f"{TO_NOW}null<|call|><|start|>assistant{TO_NOW}{{}}", "", NOW * 2),
    *(("mistral", f"[TOOL_CALLS]now[ARGS]{given}", "", NOW) for given in ("null", '""', " null ")),
    ("mistral", "[TOOL_CALLS]now[ARGS]null[TOOL_CALLS]now[ARGS][TOOL_CALLS]now{}", "", NOW * 3),
    ("qwen", "<tool_call><function=now></function></tool_call>", "", NOW),
]
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    *NOTHING,
    ("harmony", f"{HARMONY}<|call|><|start|>assistant{HARMONY}", "", ONE * 2),
    ("harmony", f'Now: {ROLE}{{"city": "Rome", "days": 2}}', "Now:", ONE),
    ("harmony", f"{TO}<|message|>Rome", f"{TO}<|message|>Rome", []),
    ("harmony", f"{TO}s<|message|>{{}}", f"{TO}s<|message|>{{}}", []),
    ("hermes", f"Let me see.\n\n{HERMES}\n", "Let me see.", ONE),
    ("hermes", f"{HERMES} and then", " and then", ONE),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", ONE),
    ("hermes", f"<tool_call>[{OBJECT}, {OBJECT}]</tool_call>", "", ONE * 2),
    ("hermes", f"<tool_call>{OBJECT}\n{OBJECT}</tool_call>", "", ONE * 2),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "Rome", "days": 2}, "name": "weather"}</tool_call>',
        "",
        ONE,
    ),
    (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {}, "id": "{7"}</tool_call>',
        "",
        [("now", {})],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"}"}}</tool_call>',
        "",
        [("weather", {"city": '</tool_call>"}'})],
    ),
    ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", ONE * 2),
    ("llama3", f"Well. <|python_tag|>{LLAMA}", "Well.", ONE),
    ("llama3", f"Well. {LLAMA}", f"Well. {LLAMA}", []),
    ("llama3", LLAMA.replace("{", '{"type": "function", ', 1), "", ONE),
    ("mistral", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]", "", ONE * 2),
    ("mistral", f"Hm.[TOOL_CALLS]weather[ARGS]{json.dumps(HERE)}", "Hm.", ONE),
    (
        "mistral",
        "".join(f"[TOOL_CALLS]weather[CALL_ID]123[ARGS]{json.dumps(HERE)}" for _ in range(2)),
        "",
        ONE * 2,
    ),
    ("mistral", "[TOOL_CALLS]a-b_1{}", "", [("a-b_1", {})]),
    ("qwen", f"So:\n{QWEN}\n{QWEN}", "So:", ONE * 2),
    ("qwen", "<function=now>\n</function>", "", [("now", {})]),
    ("qwen", QWEN.replace("\n2\n", "\ntwo\n"), "", [("weather", {"city": "Rome", "days": "two"})]),
    ("qwen", QWEN.replace("Rome", "12"), "", [("weather", {"city": "12", "days": 2})]),
    ("pythonic", "[weather(city='Rome', days=2)]", "", ONE),
    ("pythonic", '[weather(city="Rome", days=2), now()]', "", [*ONE, ("now", {})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", {})]),
    (
        "pythonic",
        "[a-b_1(city=[1, -2.5, (None, true)], days={'a]': \"\\\"'\\/\"})]",
        "",
        [("a-b_1", {"city": [1, -2.5, [None, True]], "days": {"a]": "\"'/"}})],
    ),
    ("json", f" [{OBJECT},\n{OBJECT}]\n", "", ONE * 2),
    ("json", f"{OBJECT} Done.", " Done.", ONE),
    (
        "json",
        '{"type": "function", "function": {"name": "now", "arguments": "{}"}}',
        "",
        [("now", {})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), TEXTS)
def test_what_texts_are(name: str, text: str, content: str, calls: list[Any]) -> None:
    assert said(name, text) == (content, calls)
    assert said(name, text, cuts=range(1, len(text))) == (content, calls)


STRING, NULL = {"type": "string"}, {"type": "null"}
OPTIONAL = {"anyOf": [STRING, NULL]}
ZIP, SIZE = {"$ref": "#/$defs/Zip"}, {"$ref": "#/$defs/Size"}
DEFS = {
    "Zip": STRING,
    "Size": {"enum": ["1", "2"]},
    "a/b": {"type": "integer"},
    "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"type": "boolean"}]},
    **{f"D{n}": {"anyOf": [{"$ref": f"#/$defs/D{n + 1}"}] * 9} for n in range(400)},
}
VALUES_OF_SCHEMAS: list[tuple[Any, str, Any]] = [
    (STRING, "3.10", "3.10"),
    (STRING, '"a"', '"a"'),
    (STRING, "null", "null"),
    ({"type": "string", "pattern": "a"}, "3.10", "3.10"),
    *((OPTIONAL, text, text) for text in ("3.10", "10115", "true", "None", '{"a": 1}', '"a"', "")),
    (OPTIONAL, "null", None),
    ({"type": ["string", "null"]}, "1e5", "1e5"),
    ({"type": ["null", "integer", "string"]}, "5", "5"),
    ({"oneOf": [STRING]}, "007.50", "007.50"),
    (ZIP, "10115", "10115"),
    ({"allOf": [ZIP]}, "10115", "10115"),
    ({"anyOf": [ZIP, NULL]}, "10115", "10115"),
    (SIZE, "1", "1"),
    ({"anyOf": [SIZE, NULL]}, "1", "1"),
    ({"anyOf": [SIZE, NULL]}, '"1"', "1"),
    ({"anyOf": [SIZE, NULL]}, "None", None),
    ({"enum": ["None", None]}, "None", "None"),
    ({"enum": ["null", None]}, "null", "null"),
    ({"enum": ["1", 2]}, "2", 2),
    ({"enum": ["a", True]}, "True", True),
    ({"anyOf": [{"const": "1"}, {"const": "2"}]}, "2", "2"),
    ({"type": ["string", "integer"], "maxLength": 2}, "12", "12"),
    ({"type": ["string", "integer"], "maxLength": 2}, "123", 123),
    ({"anyOf": [{"type": "string", "format": "date"}, {"type": "integer"}]}, "123", 123),
    ({"anyOf": [{"type": "string", "format": "date"}, {"type": "integer"}]}, "a", "a"),
    *(({"type": "boolean"}, *each) for each in (("True", True), ("false", False), ("no", "no"))),
    ({"anyOf": [{"type": "integer"}, NULL]}, "None", None),
    ({"anyOf": [{"type": "integer"}, NULL]}, "null", None),
    ({"anyOf": [{"type": "integer"}, NULL]}, "-5", -5),
    ({"type": "integer"}, "None", "None"),
    ({"type": "integer"}, "two", "two"),
    ({"type": "number"}, "3.10", 3.1),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "object"}, "{'a': None}", {"a": None}),
    ({"type": "object"}, "{1: 2}", "{1: 2}"),
    ({"type": "array"}, "['a', True, (1, 2)]", ["a", True, [1, 2]]),
    ({"type": "array"}, '["a"]', ["a"]),
    ({"type": "array"}, "[" * 3000, "[" * 3000),
    ({"anyOf": [{"type": "object"}, {"type": "boolean"}]}, "False", False),
    ({"$ref": "#/$defs/a~1b"}, "5", 5),
    ({"$ref": "#/properties/w"}, "5", 5),
    ({"$ref": "#/$defs/Round"}, "True", True),
    ({"$ref": "#/nowhere"}, "5", "5"),
    ({"$ref": "#/$defs/D0"}, "5", "5"),
    *(({}, text, text) for text in ("10115", "true", "a")),
    *(({}, text, value) for text, value in (('{"a": 1}', {"a": 1}), ("[1]", [1]), ("null", None))),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES_OF_SCHEMAS)
def test_what_a_value_is_the_schema_says(schema: Any, text: str, value: Any) -> None:
    other = {"w": {"type": "integer"}}
    for own in ({"properties": {"v": schema, **other}}, {"additionalProperties": schema}):
        root = {"type": "object", "properties": other, "$defs": DEFS, **own}
        parser = find_format("", "qwen").parser([Tool("f", parameters=root)])
        written = f"<function=f>\n<parameter=v>\n{text}\n</parameter>\n</function>"
        (call,) = whole([*parser.feed(written), *parser.finish()]).calls
        found = json.loads(call.arguments)["v"]
        assert (found, type(found)) == (value, type(value))


NO_CALLS = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>now</tool_call>"),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", </tool_call> and more'),
    ("hermes", '<tool_call>{"name": "now, "arguments": {}}'),
    ("hermes", "a < b, <tool, <tool_cal"),
    ("llama3", '{"name": "now", "parameters": 1}; yes'),
    ("llama3", '<|python_tag|>print("now")'),
    ("llama3", '{"name": "Bob", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS]nullable"),
    ("mistral", "[TOOL_CALLS]now[ARGS]"),  # cut off
    ("harmony", f"{TO_NOW}nullable"),
    ("harmony", f"{TO_NOW}null or not"),
    ("hermes", '<tool_call>{"name": "now", "arguments": false}</tool_call>'),
    ("mistral", "[TOOL_CALLS]" + "now " * 100 + "{}"),
    ("qwen", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen", "<tool_call>{}</tool_call>"),
    ("qwen", "<function=" + "a" * 300 + ">"),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(a=b)]"),
    ("pythonic", "[now(a=1, **{})]"),
    ("pythonic", "[now(a='" + "x" * 70_000 + "')]"),
    ("pythonic", "[other()]"),
    ("pythonic", "[now(" + "(" * 500 + ")" * 500 + ")]"),
    ("json", "[1]"),
    ("json", '{"answer": 42}'),
    ("json", f"The call is {OBJECT}"),
    ("json", "[" * 100_000),
    ("json", '{"a":' * 50_000),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_cannot_be_parsed_is_content(name: str, text: str) -> None:
    assert parsed(name, text) == (text, [])
    assert parsed(name, text, cuts=range(1, len(text), 1 + len(text) // 2000)) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Zürich \\ud83d"}, "name": "weather"}'),
        ("json", '{"arguments": "{\\"city\\": \\"Zürich \\\\ud83d\\"}", "name": "weather"}'),
        ("pythonic", '[weather(city="Zürich \\ud83d")]'),
    ],
)
def test_arguments_have_characters_as_they_are(name: str, text: str) -> None:
    """But for half a surrogate pair, which no text can have."""
    parser = find_format("", name).parser(TOOLS)
    (call,) = whole([*parser.feed(text), *parser.finish()]).calls
    assert call.arguments == '{"city": "Zürich \\ud83d"}'


def test_what_goes_wrong_within_a_call_is_content_from_there() -> None:
    begun = '<tool_call>{"name": "now", "arguments": {"a": 1}'
    assert parsed("hermes", f"{begun} oops") == (" oops", [Call("now", '{"a": 1}')])
    assert parsed("hermes", f"{begun}, oops") == (", oops", [Call("now", '{"a": 1}')])
    cut = QWEN.replace("<parameter=days>", "<oops>")
    content, (call,) = parsed("qwen", cut)
    assert content.startswith("\n<oops>") and call.arguments == '{"city": "Rome"'
    # As far as it came.
    cut = QWEN[: QWEN.index("me\n</parameter>")]
    assert parsed("qwen", cut) == ("", [Call("weather", '{"city": "Ro')])
    cut = HERMES[: HERMES.index('me"', 40)]
    assert parsed("hermes", cut) == ("", [Call("weather", '{"city": "Ro')])


@pytest.mark.parametrize("name", NAMES)
def test_what_a_forced_call_is_cut_off_in_is_no_content(name: str) -> None:
    for calls in (1, 2):
        text = find_format("", name).written([Call("weather", json.dumps(HERE))] * calls)
        for length in range(len(text) + 1):
            content, found = parsed(name, text[:length], forced=True)
            assert not content, text[:length]
            assert parsed(name, text[:length], range(length), forced=True) == (content, found)
            if length <= text.index("weather"):
                assert not found
        assert parsed(name, text, forced=True) == parsed(name, text)


def test_further_calls_than_are_allowed_are_content() -> None:
    assert said("hermes", f"{HERMES}\n{HERMES}", most=1) == (f"\n{HERMES}", ONE)
    assert said("json", f"[{OBJECT}, {OBJECT}]", most=1) == (f", {OBJECT}]", ONE)
    assert said("llama3", f"{LLAMA}; {LLAMA}", most=1) == (f"; {LLAMA}", ONE)
    assert said("pythonic", "[now(), now()]", most=1) == (", now()]", [("now", {})])
    assert said("qwen", QWEN * 2, most=1) == (QWEN, ONE)
    both = f"[TOOL_CALLS][{OBJECT}]"
    assert said("mistral", both * 2, most=1) == (both, ONE)


def test_arguments_are_told_as_they_come() -> None:
    parser = find_format("", "hermes").parser(TOOLS)
    assert parser.feed('Hi <tool_call>{"name": "weather", "arguments": ') == [Content("Hi")]
    assert parser.feed('{"city": "R') == [CallBegin("weather"), Arguments('{"city": "R')]
    assert parser.feed("ome") == [Arguments("ome")]
    assert parser.feed('"}}</tool') == [Arguments('"}')]
    assert parser.feed("_call>") == parser.finish() == []
    parser = find_format("", "hermes").parser(TOOLS)
    assert parser.feed("no <") == [Content("no")]
    assert parser.feed("b>\n") == [Content(" <b>")]
    assert parser.finish() == [Content("\n")]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=now>", "</function>", "<parameter=city>"),
    *("</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "; ", ", "),
    *("now(", "city='", "')", '"', "\\", "\n", " ", "{", "}", "[", "]", "now", "weather", "<", "é"),
    *('{"name": "now", "arguments": ', '{"city": "Rome"}', OBJECT, LLAMA, HERMES, QWEN, "[now()]"),
]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50, deadline=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    cuts=st.lists(st.integers(0, 400), max_size=20),
    most=st.sampled_from([None, 1]),
)
def test_how_a_text_is_cut_makes_no_difference(
    name: str, fragments: list[str], cuts: list[int], most: int | None
) -> None:
    text = "".join(fragments)
    forced = parsed(name, text, (), most, forced=True)
    assert parsed(name, text, cuts, most, forced=True) == forced
    assert parsed(name, text, range(len(text)), most, forced=True) == forced
    content, calls = parsed(name, text, (), most)
    assert parsed(name, text, cuts, most) == (content, calls)
    assert parsed(name, text, range(len(text)), most) == (content, calls)
    if not calls:
        assert content == text
    # Content is what the text has, in its order.
    rest = iter(text)
    assert all(letter in rest for letter in content)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_junk_is_content(name: str, text: str) -> None:
    assert parsed(name, text, range(len(text))) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen"])
@settings(max_examples=60, deadline=None)
@given(city=VALUES, days=VALUES, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_what_is_written_is_read(name: str, city: Any, days: Any, cuts: list[int]) -> None:
    form, wanted = find_format("", name), {"city": city, "days": days}
    if name == "pythonic":  # which has no names for JSON's, and others' are no Python
        wanted = json.loads(json.dumps(wanted))
    text = form.written([Call("weather", json.dumps(wanted)), Call("now", "{}")])
    assert said(name, text, cuts=cuts) == ("", [("weather", wanted), ("now", {})])


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_costs_no_more_for_each_character(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied, take = [0], TextParser._take

    def counted(parser: TextParser, length: int) -> str:
        copied[0] += len(parser._held)
        return take(parser, length)

    monkeypatch.setattr(TextParser, "_take", counted)
    form = find_format("", name)
    for text in (*form.markers, form.written([Call("now", "{}")])):
        costs = []
        for times in (2000, 8000):
            copied[0] = 0
            parser = form.parser(TOOLS)
            whole([*parser.feed(text * times), *parser.finish()])
            costs.append(copied[0])
        assert costs[1] <= 5 * costs[0], text
