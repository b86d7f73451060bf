"""What is thought in texts of each format, however they are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import ConfigError
from jaxserve.server.reasoning.message import MessageParser
from jaxserve.server.reasoning.registry import find_format, formats
from jaxserve.server.tools import registry as tool_formats
from jaxserve.server.tools.calls import Said, Tool, whole

NAMES = sorted(formats())
TOOLS = (Tool("weather"),)
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"


def said(
    name: str, text: str, prompt: str = "", cuts: Sequence[int] = (), tools: Sequence[Tool] = ()
) -> Said:
    form = find_format("", name)
    assert form is not None
    calls = tool_formats.find_format("").parser(tools) if tools else None
    parser = MessageParser(form.parser(prompt), calls)
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [parser.feed(text[a:b]) for a, b in itertools.pairwise(places)]
    return whole([*itertools.chain(*pieces), *parser.finish()])


TEXTS: list[tuple[str, str, str, str, str]] = [
    ("think", "", "<think>\nHm. So\n\nit is.\n</think>\n\nYes.\n", "Hm. So\n\nit is.", "Yes.\n"),
    ("think", "", "\n<think></think>Yes", "", "Yes"),
    ("think", "", " Yes <think>no</think>", "", " Yes <think>no</think>"),
    ("think", "", "Yes</think>", "", "Yes</think>"),
    ("think", "", "<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
    ("think", "", "<think>and so ", "and so", ""),
    ("think", "", "<thin", "", "<thin"),
    ("think", "", "  ", "", "  "),
    ("think", "assistant\n<think>\n", "Hm.\n</think>\n\nYes", "Hm.", "Yes"),
    ("think", "assistant\n<think>\n", "<think>\nHm.</think>Yes", "Hm.", "Yes"),
    ("think", "assistant\n<think>", "Hm", "Hm", ""),
    ("think", "user: <think>\nassistant:", "Hm", "", "Hm"),
    ("think", "<think>\n\n</think>\n\n", "<think>Hm</think>", "", "<think>Hm</think>"),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes", "Hm.", "Yes"),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes", "Hm.", "Yes"),
    ("granite", "", "Here's my thought process: Hm.\nHere is my response: Yes", "Hm.", "Yes"),
    ("harmony", "", f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.", "Hm.", "Yes."),
    ("harmony", "", f"{ANALYSIS}A{NEXT}{ANALYSIS}B{NEXT}{FINAL}C<|return|>", "A\nB", "C"),
    ("harmony", "", f"{ANALYSIS}A{FINAL}B", "A", "B"),
    ("harmony", "", f"<|channel|>commentary<|message|>Now{NEXT}{FINAL}C", "", "Now\nC"),
    ("harmony", "", f"{ANALYSIS}A{NEXT}{TO}", "A", TO),
    ("harmony", "", f" to=functions.f{TO}", "", f" to=functions.f{TO}"),
    ("harmony", "", "Yes.", "", "Yes."),
    ("harmony", "", f"Hm {FINAL}Yes", "", "Hm Yes"),
    ("harmony", "", "<|channel|>" + "a" * 300, "", "<|channel|>" + "a" * 300),
    ("harmony", "", "<|start|>user: a", "", "<|start|>user: a"),
    ("harmony", f"<|start|>assistant{ANALYSIS}", f"A{NEXT}{FINAL}B", "A", "B"),
    ("harmony", f"<|start|>assistant{FINAL}", "B<|return|>", "", "B"),
    ("harmony", f"{ANALYSIS}A<|end|><|start|>assistant", f"{FINAL}B", "", "B"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), TEXTS)
def test_texts(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for cuts in ((), range(len(text))):
        assert said(name, text, prompt, cuts) == Said(content, reasoning)


WORDS = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", " ", "\n"),
    *("Here is my thought process:", "Here's my response:", "<", "<|", "a", "</th", CALL),
    *(ANALYSIS, FINAL, NEXT, TO, "<|channel|>", "<|start|>", "<|message|>", "<|end|>", " to="),
]
PROMPTS = ["", "<think>", "[THINK]\n", "</think>", f"<|start|>assistant{ANALYSIS}"]


@settings(deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(WORDS), max_size=12).map("".join),
    st.sampled_from(PROMPTS),
    st.lists(st.integers(1, 200)),
    st.sampled_from([(), TOOLS]),
)
def test_cuts_make_no_difference(
    name: str, text: str, prompt: str, cuts: list[int], tools: tuple[Tool, ...]
) -> None:
    assert said(name, text, prompt, cuts, tools) == said(name, text, prompt, (), tools)


@settings(deadline=None)
@given(
    st.sampled_from(NAMES), st.lists(st.sampled_from(WORDS), max_size=12), st.sampled_from(PROMPTS)
)
def test_no_words_are_lost(name: str, markers: list[str], prompt: str) -> None:
    words = [f"w{place}." for place in range(len(markers))]
    text = "".join(marker + word for marker, word in zip(markers, words, strict=True))
    found = said(name, text, prompt)
    for word in words:
        assert (word in found.reasoning) != (word in found.content)


def test_calls_stand_outside_of_thoughts() -> None:
    text = f"<think>I could {CALL}</think>\n{CALL}\n"
    for cuts in ((), range(len(text))):
        found = said("think", text, "", cuts, TOOLS)
        assert found.reasoning == f"I could {CALL}" and found.content == ""
        assert [call.name for call in found.calls] == ["weather"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<think>' }}", "think"),
        ("{% set content = content.split('</think>')[-1] %}", "think"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("Here is my thought process:", "granite"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("<|im_start|>", None),
    ],
)
def test_found_by_the_template(source: str, name: str | None) -> None:
    found = find_format(source)
    assert (None if found is None else found.name) == name


def test_named() -> None:
    assert find_format("<think>", "none") is None
    with pytest.raises(ConfigError, match=r"reasoning_format: must be auto, none, .*'loud'"):
        find_format("", "loud")
