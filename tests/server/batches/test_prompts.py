"""The client's file of prompts."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.client import make_line
from jaxserve.client.prompts import PromptError, Prompts, read_prompts


def read(path: Path, *lines: object, **defaults) -> Prompts:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_prompts(path, defaults)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_lines_become_messages(path: Path) -> None:
    sampling = {"max_tokens": 4, "stop": ["x"], "logit_bias": {"7": 1}, "ignore_eos": True}
    prompts = read(
        path,
        {"prompt": "Once"},
        "",
        {"id": "b", "token_ids": [5, 6], "sampling": {**sampling, "seed": None}},
        "  ",
        {"prompt": "", "sampling": {"max_tokens": 9}, "cache_salt": "me", "prompt_cache_key": "k"},
        max_tokens=3,
    )
    assert prompts.numbers == [1, 3, 5], "as editors count them"
    assert prompts.lines == [
        make_line("Once", max_tokens=3),
        make_line(
            [5, 6], line_id="b", max_tokens=4, stop=["x"], logit_bias={7: 1.0}, ignore_eos=True
        ),
        # For the server to refuse, alone.
        make_line("", cache_salt="me", prompt_cache_key="k", max_tokens=9),
    ]


def test_what_some_editors_put_before_the_text_is_no_part_of_it(path: Path) -> None:
    assert read(path, '\ufeff{"prompt": "Once"}').lines == [make_line("Once")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"line 3: is not JSON: .* at column \d"),
        ("[" * 100_000, "line 3: is not JSON"),
        ("[1]", r'line 3: must be an object, as \{"prompt"'),
        ({"promt": "x"}, "line 3: unknown field 'promt'; known ones are id, prompt, token_ids, sa"),
        ({"id": "x"}, "line 3: needs either prompt or token_ids"),
        ({"prompt": "x", "token_ids": [1]}, "line 3: needs either prompt or token_ids"),
        ({"prompt": 3}, "prompt: must be a string"),
        ({"token_ids": "x"}, "token_ids: must be a list of integers"),
        ({"token_ids": [True]}, "token_ids: must be a list of integers"),
        ({"token_ids": [2**31]}, "token_ids: must be 32-bit integers"),
        ({"prompt": "x", "id": 3}, "id: must be a string of at most 128 characters"),
        ({"prompt": "x", "id": "i" * 129}, "id: must be a string of at most 128 characters"),
        ({"prompt": "x", "id": "a"}, "id: 'a' is line 1's"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt: must be a string"),
        ({"prompt": "x", "sampling": 3}, "sampling: must be an object"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "sampling parameter 'temprature'; known"),
        ({"prompt": "x", "sampling": {"max_tokens": 3_000_000_000}}, "max_tokens: "),
        ({"prompt": "x", "sampling": {"top_k": True}}, "top_k: must not be true or false"),
        ({"prompt": "x", "sampling": {"ignore_eos": 1}}, "ignore_eos: must be true or false"),
        ({"prompt": "x", "sampling": {"deterministic": 0}}, "deterministic: must be true or false"),
        ({"prompt": "x", "sampling": {"stop": {"a": 1}}}, "stop: must not be an object"),
        ({"prompt": "x", "sampling": {"logit_bias": {"7": True}}}, "logit_bias: must be an object"),
        ({"prompt": "x", "sampling": {"logit_bias": [1]}}, "logit_bias: must be an object"),
        ({"prompt": "x", "sampling": {"logit_bias": {"a": 1}}}, "logit_bias: must be an object"),
        ('{"prompt": "\\ud800"}', "half a character"),
        ('{"prompt": "x", "cache_salt": "\\ud800"}', "half a character"),
    ],
)
def test_what_is_wrong_is_one_line(path: Path, line: object, words: str) -> None:
    with pytest.raises(PromptError, match=words) as error:
        read(path, {"prompt": "x", "id": "a"}, "", line, {"prompt": "behind it"})
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_file_without_prompts(path: Path, lines: list[str]) -> None:
    with pytest.raises(PromptError, match="there are no prompts in it"):
        read(path, *lines)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
_near = st.fixed_dictionaries(
    {}, optional={"id": _json, "prompt": _json, "token_ids": _json, "sampling": _json}
)


@given(_json | _near | st.builds(lambda value: {"prompt": "x", "sampling": {"stop": value}}, _json))
def test_whatever_is_in_it_there_is_a_message_or_a_prompt_error(tmp_path_factory, value) -> None:
    path = tmp_path_factory.getbasetemp() / "prompts.jsonl"
    try:
        assert len(read(path, value).lines) == 1
    except PromptError as error:
        assert "\n" not in str(error) or "\n" in str(value)


def test_the_digest_is_of_all_that_is_asked_for(path: Path) -> None:
    lines = [{"prompt": "a", "sampling": {"logit_bias": {"1": 1, "2": 2, "3": 3}}}, {"prompt": "b"}]
    digest = read(path, *lines).digest()
    assert read(path, *lines).digest() == digest
    others = [
        read(path, *lines, max_tokens=3),
        read(path, *lines, {"prompt": "c"}),
        read(path, lines[1], lines[0]),
        read(path, lines[0], "", lines[1]),
        read(path, lines[0], {"prompt": "b", "id": "b"}),
    ]
    assert len({digest, *(other.digest() for other in others)}) == 6
