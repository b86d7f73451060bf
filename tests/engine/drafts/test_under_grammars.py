"""What a grammar allows along a draft is what it allows one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from jaxserve.engine.drafts.drafting import Drafts
from jaxserve.engine.drafts.forced import GRAMMAR
from jaxserve.engine.text import grammars
from jaxserve.engine.text.grammars import CompiledGrammar, GrammarMatcher, Grammars
from jaxserve.sched.request import Grammar
from tests.engine.harness import BOX
from tests.engine.text.tokenizers_for_tests import allowed

DEFINITION = (BOX / "tokenizer.json").read_text(encoding="utf-8")
VOCAB, EOS = json.loads((BOX / "config.json").read_text())["vocab_size"], 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alphabet", "alphanumeric", "Tim"]},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "description": {"const": "a happy lion"},
    },
    "required": ["name", "likes", "description"],
    "additionalProperties": False,
}
GRAMMARS = [
    Grammar.json_schema(SCHEMA),
    Grammar.json_object(),
    Grammar.regex("(once upon a time|once more),? (a{2,5}|é+) was happy\\."),
    Grammar.choice(["red", "red green", "red green blue"]),
]
MADE = Grammars(DEFINITION, VOCAB, [EOS])
TOKENIZER = Tokenizer.from_str(DEFINITION)


def walk(grammar: CompiledGrammar, draws: random.Random, ignore_eos: bool, most: int) -> list[int]:
    """Tokens that the grammar allows, one after the other, as an engine would draw them."""
    matcher, tokens = grammar.matcher(ignore_eos=ignore_eos), []
    while len(tokens) < most and (choice := allowed(matcher.mask())):
        tokens.append(draws.choice(choice))
        if tokens[-1] == EOS or matcher.feed(tokens[-1]):
            break
    return tokens


def fed(grammar: CompiledGrammar, tokens: Sequence[int], ignore_eos: bool) -> GrammarMatcher:
    matcher = grammar.matcher(ignore_eos=ignore_eos)
    for token in tokens:
        matcher.feed(token)
    return matcher


def one_by_one(
    grammar: CompiledGrammar, known: Sequence[int], draft: Sequence[int], ignore_eos: bool
) -> list[list[int]]:
    """What masks allow before each token and after the last, until one does not follow, or the text
    is complete."""
    masks, complete = [allowed(fed(grammar, known, ignore_eos).mask())], False
    for end, token in enumerate(draft):
        if token not in masks[-1] or complete:
            break
        matcher = fed(grammar, [*known, *draft[:end]], ignore_eos)
        complete = matcher.feed(token)
        masks.append(allowed(matcher.mask()))
    return masks


def followed(matcher: GrammarMatcher, draft: Sequence[int]) -> int:
    """How many of the tokens an engine would take, if they were drawn."""
    for taken, token in enumerate(draft):
        if token not in allowed(matcher.mask()):
            return taken
        if matcher.feed(token):
            return taken + 1
    return len(draft)


def same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return allowed(one) == allowed(other)


CASES = {
    "which": st.integers(0, len(GRAMMARS) - 1),
    "seed": st.integers(0, 10**6),
    "ignore_eos": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@example(which=3, seed=396864, ignore_eos=False, length=6, wrong=EOS)  # two ends in a row
@given(
    **CASES,
    length=st.integers(0, 7),
    wrong=st.sampled_from([None, 0, 1, EOS, 300, VOCAB - 1, VOCAB, 2**31 - 1, -1]),
)
def test_masks_along_a_draft_are_those_one_by_one(
    which: int, seed: int, ignore_eos: bool, length: int, wrong: int | None
) -> None:
    """Also for drafts with a token that does not follow; and the matcher is as it was."""
    grammar, draws = MADE.compile(GRAMMARS[which]), random.Random(seed)
    text = walk(grammar, draws, ignore_eos, 60)
    split = draws.randrange(len(text))
    known, draft = text[:split], text[split : split + length]
    if wrong is not None:
        draft.insert(draws.randrange(len(draft) + 1), wrong)
    matcher, untouched = (fed(grammar, known, ignore_eos) for _ in range(2))
    expected = one_by_one(grammar, known, draft, ignore_eos)
    masks = matcher.masks_along(draft)
    assert [allowed(mask) for mask in masks[: len(expected)]] == expected
    assert masks[len(expected) :] == [None] * (len(draft) + 1 - len(expected))
    assert matcher.valid_prefix(draft) == followed(fed(grammar, known, ignore_eos), draft)
    for token in text[split:]:  # it goes on as if nothing had been asked
        assert same(matcher.mask(), untouched.mask())
        matcher.masks_along(draft)
        matcher.valid_prefix(draft)
        matcher.forced(3)
        assert matcher.feed(token) == untouched.feed(token)
    assert matcher.problem == untouched.problem


@settings(max_examples=60, deadline=None)
@given(**CASES, most=st.integers(1, 12))
def test_forced_tokens_are_those_that_masks_leave(
    which: int, seed: int, ignore_eos: bool, most: int
) -> None:
    grammar, draws = MADE.compile(GRAMMARS[which]), random.Random(seed)
    text = walk(grammar, draws, ignore_eos, 60)
    matcher = grammar.matcher(ignore_eos=ignore_eos)
    for at, token in enumerate(text):
        tokens = matcher.forced(most)
        masks = one_by_one(grammar, text[:at], tokens, ignore_eos)
        assert masks[: len(tokens)] == [[token] for token in tokens]
        matcher.feed(token)


def test_some_are_forced() -> None:
    grammar = MADE.compile(Grammar.json_schema(SCHEMA))
    known = TOKENIZER.encode('{"name":"alphan', add_special_tokens=False).ids
    drafting = Drafts().of((1, 2, 3), matcher=fed(grammar, known, False))
    draft = drafting.propose(7, lambda source, strength: 1.0)
    assert draft is not None
    assert draft.certain
    assert draft.source == GRAMMAR
    assert TOKENIZER.decode(list(draft.tokens)).startswith("umeric")
    draft = drafting.propose(1, lambda source, strength: 1.0)
    assert draft is not None
    assert len(draft.tokens) == 1


def test_a_token_that_the_model_has_not_is_not_forced() -> None:
    """The mask has none then, and the text ends with an error as without drafts."""
    grammar = MADE.compile(Grammar.choice(["red green"]))
    token = grammar.matcher(ignore_eos=False).forced(1)[0]
    keep = grammars._without(grammar._keep, [token])
    start = grammar._matcher
    matcher = GrammarMatcher(start.deep_copy(), keep, start, grammar._limits, lambda: None)
    assert matcher.forced(4) == []
    assert matcher.mask() is None
    assert matcher.valid_prefix([token]) == 0


@settings(max_examples=30, deadline=None)
@given(**CASES, noise=st.integers(0, 3))
def test_a_draft_under_a_grammar_is_always_valid(
    which: int, seed: int, ignore_eos: bool, noise: int
) -> None:
    """The prompt has other texts under the grammar, and tokens that are not."""
    grammar, draws = MADE.compile(GRAMMARS[which]), random.Random(seed)
    prompt = [EOS, *walk(grammar, draws, ignore_eos, 40), *walk(grammar, draws, ignore_eos, 40)]
    for _ in range(noise):
        prompt.insert(draws.randrange(len(prompt)), draws.randrange(VOCAB))
    text = walk(grammar, draws, ignore_eos, 40)
    matcher = grammar.matcher(ignore_eos=ignore_eos)
    drafting = Drafts().of(tuple(prompt), prediction=prompt[5:], matcher=matcher)
    for at, token in enumerate(text):
        draft = drafting.propose(5, lambda source, strength: strength / 4)
        if draft is not None:
            masks = one_by_one(grammar, text[:at], draft.tokens, ignore_eos)
            assert len(masks) == len(draft.tokens) + 1
        matcher.feed(token)
        drafting.append(token)


def test_an_error_in_a_draft_is_none_of_the_texts() -> None:
    """A matcher never leaves its error: what was only tried must not end the text."""
    grammar = MADE.compile(Grammar.json_schema(SCHEMA))
    known = TOKENIZER.encode('{"name":"alphan', add_special_tokens=False).ids
    matcher, untouched = (fed(grammar, known, False) for _ in range(2))
    matcher._matcher.consume_token(EOS)
    assert matcher.problem
    matcher._take_back(1)
    assert not matcher._matcher.is_error()
    assert matcher.forced(20) == untouched.forced(20) != []
    for token in untouched.forced(20):
        assert same(matcher.mask(), untouched.mask())
        assert matcher.feed(token) == untouched.feed(token)


def test_an_error_of_the_text_stays() -> None:
    grammar = MADE.compile(Grammar.json_schema(SCHEMA))
    matcher = fed(grammar, [300], False)
    problem = matcher.problem
    assert "too complex" in problem
    assert matcher.masks_along([5, 6]) == [None, None, None]
    assert matcher.valid_prefix([5, 6]) == 0
    assert matcher.forced(3) == []
    assert matcher.problem == problem
