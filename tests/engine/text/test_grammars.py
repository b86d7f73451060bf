"""Text under a grammar is what the grammar says, whatever else is asked for or served beside it.

The model is the one in the box: it has a tokenizer, and never had JSON in its life.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.text.grammar_process import GrammarLimits
from jaxserve.engine.text.grammars import Grammars
from jaxserve.engine.text.text_limit import BYTE_OF_CHAR
from jaxserve.sched.request import MAX_GRAMMAR, Grammar, InvalidRequest
from tests.engine.harness import Stream, box, send
from tests.engine.text.test_thinking import ONCE, SCHEMA, SEEDED, within

SCARCE = {  # whole prompts, and memory for few
    "cache__num_blocks": 36,
    "scheduler__max_rows": 8,
    "engine__max_model_len": 64,
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,7}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "cake"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
EOS = 2
FREE = 200  # tokens, more than any of these takes


def ask(on: Engine, grammar: Grammar | None, text: str = "Once upon a time", **how: Any) -> Stream:
    how.setdefault("max_tokens", FREE)
    _, stream = send(on, on.encode(text), grammar=grammar, **how)
    return stream


_leaves = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -7, "maximum": 1200},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "string", "maxLength": 6},
        {"type": "string", "enum": ["a", 'b"\\', "ü\n"]},
        {"const": {"x": [1, None]}},
    ]
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b c", "ü"])
    return st.one_of(
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties),
                "additionalProperties": False,
            },
            st.dictionaries(names, inner, max_size=2),
        ),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    )


SCHEMAS = st.recursive(_leaves, _nested, max_leaves=4)


@pytest.mark.promise(9)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6), min_tokens=st.sampled_from([0, 30]))
def test_json_is_valid_by_its_schema(
    on: Engine, schema: dict[str, Any], seed: int, min_tokens: int
) -> None:
    stream = ask(
        on,
        Grammar.json_schema(schema),
        temperature=1.0,
        seed=seed,
        n=2,
        min_tokens=min_tokens,
        max_tokens=400,
        logprobs=1,
    ).wait()
    for index in range(2):
        assert stream.last(index).finish_reason is FinishReason.STOP, stream.text(index)
        jsonschema.validate(json.loads(stream.text(index)), schema)


def test_beside_log_probabilities_of_the_prompt(on: Engine) -> None:
    """They come of the first half of a step whose tokens are drawn later."""
    asked, plain = (
        [e for o in ask(on, one, prompt_logprobs=2).wait().outputs for e in o.prompt_logprobs]
        for one in (Grammar.choice(["red", "green"]), None)
    )
    assert [e.token_id for e in asked] == on.encode("Once upon a time")[1:]
    assert [[t for t, _ in e.top] for e in asked] == [[t for t, _ in e.top] for e in plain]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("pattern", ["[A-Z][a-z]+ likes (tea|[0-9]{2,4})\\.", "a{2,5}", "é+\n?"])
def test_regex(on: Engine, pattern: str, ignore_eos: bool) -> None:
    sampled = {"temperature": 1.0, "seed": 3, "n": 4, "ignore_eos": ignore_eos}
    stream = ask(on, Grammar.regex(pattern), **sampled).wait()
    for index in range(4):
        text = stream.text(index)
        if stream.last(index).finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, text)
        else:
            assert re.fullmatch(r"[A-Z][a-z]+|é+", text), "a prefix without an end"


def test_choice(on: Engine) -> None:
    choices = ["red", "red.", "a|b", "[x] (y)\n\\d ^$", "ä", " green"]
    stream = ask(on, Grammar.choice(choices), temperature=5.0, seed=5, n=16).wait()
    texts = {stream.text(index) for index in range(16)}
    assert texts <= set(choices)
    assert len(texts) > 2, "nothing was drawn"


def test_every_choice_can_be_drawn(on: Engine) -> None:
    choices = ["a.b", "a|b", "x*+?", "(", "]{", "\\", "^$", "-#&~ \n\t/\"'", "é😀"]
    streams = [ask(on, Grammar.choice([one])) for one in choices]
    assert [stream.wait().text() for stream in streams] == choices


def test_any_object(on: Engine) -> None:
    stream = ask(on, Grammar.json_object(), logit_bias=((on.encode("}")[-1], 100.0),)).wait()
    assert stream.reason is FinishReason.STOP
    assert isinstance(json.loads(stream.text()), dict)


@pytest.mark.promise(9)
def test_length_ends_it_with_a_valid_beginning(on: Engine) -> None:
    grammar = Grammar.json_schema(PERSON)
    whole = ask(on, grammar).wait()
    assert whole.reason is FinishReason.STOP
    assert whole.tokens()[-1] != EOS, "nothing could follow, but something was drawn"
    limits = range(1, len(whole.tokens()), 4)
    for cut in [ask(on, grammar, max_tokens=most) for most in limits]:
        assert cut.wait().reason is FinishReason.LENGTH
        assert whole.text().startswith(cut.text())
    exact = ask(on, grammar, max_tokens=len(whole.tokens())).wait()
    assert (exact.text(), exact.reason) == (whole.text(), FinishReason.STOP)


def test_a_stop_string_ends_it_before(on: Engine) -> None:
    stream = ask(on, Grammar.regex("[a-z]{3}: [a-z]{3}"), stop=(": ",)).wait()
    assert stream.reason is FinishReason.STOP
    assert re.fullmatch("[a-z]{3}", stream.text())


def test_nothing_but_a_stop_token_may_come_before_min_tokens(on: Engine) -> None:
    """The grammar wins, and the token is text until then."""
    (a,) = on.encode("a")[-1:]
    stream = ask(on, Grammar.regex("a"), stop_token_ids=(a,), min_tokens=5).wait()
    assert (stream.text(), stream.reason) == ("a", FinishReason.STOP)
    stream = ask(on, Grammar.regex("a"), stop_token_ids=(a,)).wait()
    assert (stream.text(), stream.reason) == ("", FinishReason.STOP)


MIXED = [
    Grammar.json_schema(PERSON),
    None,
    Grammar.regex("([a-z]{2,6} ){8}end"),
    Grammar.choice(["one of three", "one of a few", "none"]),
    None,
    Grammar.json_schema({"type": "array", "items": PERSON, "minItems": 1, "maxItems": 1}),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"repetition_penalty": 1.2, "temperature": 0.7, "seed": 2, "top_p": 0.9},
]


def everything() -> Iterator[tuple[Grammar | None, str, dict[str, Any]]]:
    for number, how in enumerate(SAMPLINGS):
        for grammar in MIXED:
            text = "Tom had a red ball. " * (1 + number)
            yield grammar, text, {**how, "max_tokens": 30, "ignore_eos": grammar is None}
    for how in ({}, SEEDED):
        for budget in (0, 4, 9):
            yield None, ONCE, {**how, "max_tokens": 40, "thinking": within(budget)}
        of_answer = Grammar.json_schema(SCHEMA)
        yield of_answer, ONCE, {**how, "max_tokens": 40, "thinking": within(6)}
        of_answer = Grammar.regex("[a-z]{3} [a-z]{3}")
        yield of_answer, ONCE, {**how, "max_tokens": 40, "thinking": within(12, ".")}


@pytest.fixture(scope="module")
def expected(boxed: Engine) -> list[list[int]]:
    """Of each with nothing beside it."""
    return [ask(boxed, g, t, **how).wait().tokens() for g, t, how in everything()]


@pytest.mark.promise(1)
@pytest.mark.parametrize(
    ("fields", "preempts"),
    [
        ({"engine__overlap": False}, False),
        ({**SCARCE, "scheduler__policy": "bros"}, True),
        ({"scheduler__policy": "sarathi+spec"}, False),
    ],
)
def test_text_is_the_same_in_any_company(
    expected: list[list[int]], fields: dict[str, Any], preempts: bool
) -> None:
    """With thoughts and without."""
    with box(**fields) as running:
        streams = [ask(running, g, t, **how) for g, t, how in everything()]
        assert [stream.wait().tokens() for stream in streams] == expected
        assert not preempts or running.stats().preemptions


@pytest.mark.promise(1)
def test_text_is_the_same_beside_all_others(expected: list[list[int]], on: Engine) -> None:
    streams = [ask(on, g, t, **how) for g, t, how in everything()]
    assert [stream.wait().tokens() for stream in streams] == expected


def test_a_batch_without_grammars_is_drawn_as_ever(on: Engine) -> None:
    """Masks are for those steps alone in which a grammar has a say."""
    drawn, executor = [], on.executor
    sample = executor.sample
    executor.sample = lambda *args: drawn.append(1) or sample(*args)  # type: ignore[method-assign,func-returns-value]
    try:
        ask(on, None, max_tokens=5, temperature=1.0).wait()
        assert not drawn
        ask(on, Grammar.choice(["tea"])).wait()
        assert drawn
    finally:
        executor.sample = sample  # type: ignore[method-assign]


def test_many_grammars_at_once(on: Engine) -> None:
    patterns = [f"{n} bottles of [a-z]{{1,2}}" for n in range(100)]
    streams: list[Stream] = []

    def some(first: int) -> None:
        streams.extend([ask(on, Grammar.regex(p)) for p in patterns[first::4]])

    threads = [threading.Thread(target=some, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [stream.wait().text() for stream in streams]
    assert sorted(int(text.split()[0]) for text in texts) == list(range(100))
    assert all(re.fullmatch("[0-9]+ bottles of [a-z]{1,2}", text) for text in texts)


BAD = {
    "not JSON": (lambda: Grammar.json_schema("{"), "EOF|expected"),
    "no schema": (lambda: Grammar.json_schema({"type": "objekt"}), "objekt"),
    "a keyword that is not supported": (
        lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}),
        "uniqueItems",
    ),
    "one that a schema would have ignored": (
        lambda: Grammar.json_schema({"not": {}, "x-guidance": {"lenient": True}}),
        "not",
    ),
    "a remote reference": (lambda: Grammar.json_schema({"$ref": "http://a/b"}), "http://a/b"),
    "nothing is valid": (lambda: Grammar.json_schema(False), "nothing is valid"),
    "too deep": (lambda: Grammar.json_schema('{"items":' * 999 + "{}" + "}" * 999), "recursion"),
    "no expression": (lambda: Grammar.regex("(a"), "unclosed"),
    "look-around": (lambda: Grammar.regex("(?=a)b"), "look-around"),
    "only the empty text": (lambda: Grammar.regex("a{0}"), "empty"),
    "empty": (lambda: Grammar.regex(""), "empty"),
    "too long": (lambda: Grammar.regex("a" * (MAX_GRAMMAR + 1)), "at most 65536"),
    "no choice": (lambda: Grammar.choice([]), "at least one"),
    "an empty choice": (lambda: Grammar.choice(["a", ""]), "may be empty"),
    "too many choices": (lambda: Grammar.choice(["a"] * 1025), "at most 1024"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_grammars_are_refused(on: Engine, case: str) -> None:
    make, problem = BAD[case]
    with pytest.raises(InvalidRequest, match=problem) as error:
        on.check_grammar(make())
    assert error.value.field_name.startswith("grammar.")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_one_that_gets_too_complex_ends_with_an_error(
    on: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody else does."""
    wide = GrammarLimits(kept_mib=1024, mask_ms=1000)
    for one in (on._grammars, on._grammars._processes):
        monkeypatch.setattr(one, "_limits", wide)
    beside = ask(on, Grammar.regex("[a-z ]{60}"))
    grammar = Grammar.regex("a{1000}{1000}")
    stream = ask(on, grammar).wait()
    assert stream.reason is FinishReason.ERROR
    assert "too complex" in stream.last().error
    assert len(beside.wait().text()) == 60


def test_one_that_takes_too_long_ends_with_an_error(on: Engine) -> None:
    """And nobody else does; but its tenant does not begin with it again."""
    slow, before = Grammar.regex("[a-z ]{59}"), on.stats().grammar_breaches
    beside = ask(on, Grammar.regex("[a-z ]{60}"))
    on._grammars.compile(slow)._limits = GrammarLimits(mask_ms=1e-9)
    stream = ask(on, slow, tenant="ours").wait()
    assert stream.reason is FinishReason.ERROR
    assert "takes too long for each token: more than 1e-09 ms" in stream.last().error
    assert len(beside.wait().text()) == 60
    assert on.stats().grammar_breaches == before + 1
    on._grammars.compile(slow)._limits = GrammarLimits()
    with pytest.raises(InvalidRequest, match="takes too long for each token"):
        ask(on, slow, tenant="ours")
    assert len(ask(on, slow, tenant="theirs").wait().text()) == 59


def test_a_model_without_a_tokenizer_takes_none() -> None:
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        Grammars(None, 96, (2,)).compile(Grammar.regex("a"))


def test_the_tokenizer_may_have_more_tokens_than_the_model(on: Engine) -> None:
    """Those of no embedding are never allowed."""
    definition = on.tokenizer.definition()
    grammar = Grammar.regex("[a-z ]+")
    whole = Grammars(definition, 1536, (2,)).compile(grammar).matcher(ignore_eos=True).mask()
    fewer = Grammars(definition, 1000, (2,)).compile(grammar).matcher(ignore_eos=True).mask()
    more = Grammars(definition, 1600, (2,)).compile(grammar).matcher(ignore_eos=True).mask()
    assert whole is not None and fewer is not None and more is not None
    assert (len(fewer), len(whole), len(more)) == (32, 48, 50)
    assert (fewer[:31] == whole[:31]).all()
    assert fewer[31] == whole[31] & 0xFF
    assert (more[:48] == whole).all()
    assert not more[48:].any()


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("hook", ["mask", "feed", "problem"])
def test_a_grammar_that_breaks_ends_its_own_request(hook: str, on: Engine) -> None:
    digits, letters = Grammar.regex("[0-9]{9,30}"), Grammar.regex("[a-z]{9,30}")
    others = (letters, None, Grammar.json_object())
    alone = [ask(on, one, max_tokens=30).wait().tokens() for one in others]
    compiled = on._grammars.compile(digits)
    whole = compiled.matcher(ignore_eos=False)
    calls = []

    class Broken:
        """At its third call."""

        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            if name == hook and calls.count(name) == (1 if name == "problem" else 3):
                raise Panic("unreachable")
            if hook == "problem" and name == "mask":
                return lambda: None  # nothing may follow
            return getattr(whole, name)

    compiled.matcher = lambda **_: Broken()  # type: ignore[method-assign, assignment, return-value]
    try:
        victim = ask(on, digits)
        streams = [ask(on, one, max_tokens=30) for one in others]
        assert victim.wait().reason is FinishReason.ERROR
        assert victim.last().error == "Panic: unreachable"
        assert [stream.wait().tokens() for stream in streams] == alone
    finally:
        del compiled.matcher
    assert ask(on, digits).wait().reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("pattern", "fine", "refused"),
    [
        (r"\d+", "09", "\u0663"),
        (r"[a\d]+", "a7", "\uff11"),
        (r"\w+", "a_9Z", "\u00e9"),
        (r"[^\D]", "5", "\u0664"),
        (r"[^\W]", "x", "\u00f6"),
        (r"\D\W", "\u0663\u00e9", "1a"),
        (r"\\d\s", "\\d\u00a0", "\\1 "),
    ],
)
@pytest.mark.parametrize("schema", [False, True])
def test_they_are_ascii_as_in_ecma(pattern: str, fine: str, refused: str, schema: bool) -> None:
    """Whether the grammar is the expression, or a schema's pattern."""
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(BYTE_OF_CHAR)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    grammar = Grammar.regex(pattern)
    if schema:
        grammar = Grammar.json_schema(json.dumps({"type": "string", "pattern": f"^({pattern})$"}))
    made = Grammars(tokenizer.to_str(), 257, (256,)).compile(grammar)

    def accepted(text: str) -> bool:
        matcher = made.matcher(ignore_eos=False)
        for token in tokenizer.encode(json.dumps(text, ensure_ascii=False) if schema else text).ids:
            mask = matcher.mask()
            if mask is None or not mask[token // 32] >> token % 32 & 1:
                return False
            matcher.feed(token)
        return True

    assert accepted(fine)
    assert not accepted(refused)
