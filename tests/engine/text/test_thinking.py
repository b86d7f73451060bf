"""Thoughts end where their budget does, and grammars hold what comes behind them.

The model is the one in the box, which thinks nothing: any text may be the end of a thought.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.engine import Engine
from jaxserve.engine.output import FinishReason
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.engine.text.grammars import Grammars
from jaxserve.engine.text.thinking import ThoughtCount, ThoughtSpan
from jaxserve.engine.text.thinking_matcher import MarkerTokens, ThinkingMatcher
from jaxserve.sched.request import Grammar, InvalidRequest, Thinking
from jaxserve.server.reasoning.parser import TaggedParser
from jaxserve.server.tools.calls import whole
from tests.engine.harness import BOX, Stream, send
from tests.engine.text.tokenizers_for_tests import allowed

VOCAB, EOS = json.loads((BOX / "config.json").read_text())["vocab_size"], 2
TOKENIZER = load_tokenizer(BOX)
TOKENS = MarkerTokens(TOKENIZER.piece, VOCAB, [EOS])
GRAMMARS = Grammars(TOKENIZER.definition(), VOCAB, [EOS])
END = "</think>"
CLOSE = tuple(TOKENIZER.encode(f"\n{END}\n", special=False))
ONCE = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
SEEDED = {"temperature": 1.0, "seed": 11}


def within(budget: int | None, *ends: str, begins: tuple[str, ...] = ()) -> Thinking:
    return Thinking(ends or (END,), begins, CLOSE, budget)


def ask(on: Engine, thinking: Thinking | None, text: str = ONCE, **how: Any) -> Stream:
    how.setdefault("max_tokens", 40)
    _, stream = send(on, on.encode(text), thinking=thinking, **how)
    return stream


@pytest.mark.parametrize("how", [{}, SEEDED, {"temperature": 0.7, "top_p": 0.9, "seed": 5}])
def test_a_budget_ends_the_thought(on: Engine, how: dict[str, Any]) -> None:
    """Before that the text is what it is without. Greedy, what follows is what would follow."""
    how = {**how, "ignore_eos": True}
    free = ask(on, None, **how).wait().tokens()
    for budget in (0, 1, 2, 3, 17):
        tokens = ask(on, within(budget), **how).wait().tokens()
        behind = budget + len(CLOSE)
        assert tokens[:behind] == [*free[:budget], *CLOSE]
        assert len(tokens) == 40
        if "seed" not in how:
            known = [*on.encode(ONCE), *tokens[:behind]]
            _, rest = send(on, known, max_tokens=40 - behind, ignore_eos=True)
            assert rest.wait().tokens() == tokens[behind:]
    assert ask(on, within(40), **how).wait().tokens() == free
    assert ask(on, within(None), **how).wait().tokens() == free


def test_one_that_ends_before_is_left_alone(on: Engine) -> None:
    free = ask(on, None).wait()
    first = free.text().index(".")
    used = next(n for n in range(40) if "." in on.decode(free.tokens()[:n]))
    assert first and ask(on, within(used, ".")).wait().tokens() == free.tokens()
    cut = ask(on, within(used - 1, ".")).wait().tokens()
    assert cut[: used - 1 + len(CLOSE)] == [*free.tokens()[: used - 1], *CLOSE]


def test_what_begins_with_no_thought_is_left_alone(on: Engine) -> None:
    free = ask(on, None).wait().tokens()
    assert ask(on, within(0, begins=("<think>",))).wait().tokens() == free
    begin = on.decode(free[:2])
    tokens = ask(on, within(3, begins=(begin.lstrip(),))).wait().tokens()
    assert tokens[: 5 + len(CLOSE)] == [*free[:5], *CLOSE]


def test_masks_are_made_only_where_a_budget_ends(on: Engine) -> None:
    drawn, executor = [], on.executor
    sample = executor.sample
    executor.sample = lambda *args: drawn.append(1) or sample(*args)  # type: ignore[method-assign,func-returns-value]
    try:
        ask(on, within(1000), max_tokens=30).wait()
        assert not drawn
        ask(on, within(20), max_tokens=30).wait()
        assert len(drawn) <= len(CLOSE) + 4
    finally:
        executor.sample = sample  # type: ignore[method-assign]


def test_a_grammar_holds_what_comes_behind(on: Engine) -> None:
    how = {"temperature": 1.0, "seed": 0, "n": 8, "max_tokens": 60}
    grammar = Grammar.json_schema(SCHEMA)
    stream = ask(on, within(8), grammar=grammar, **how).wait()
    for index in range(8):
        assert stream.last(index).finish_reason is FinishReason.STOP
        thought, _, answer = stream.text(index).partition(END)
        jsonschema.validate(json.loads(answer), SCHEMA)
        assert thought and "{" not in thought
    stream = ask(on, within(20, ".", "!", "?"), grammar=grammar, **how).wait()
    for index in range(8):
        answer = re.split(rf"{END}|[.!?]", stream.text(index), maxsplit=1)[1]
        jsonschema.validate(json.loads(answer), SCHEMA)


def test_an_answer_without_a_thought_is_held_too(on: Engine) -> None:
    """Where the model may think, or not."""
    found = set()
    for seed in range(12):
        thinking = within(3, begins=("b", "T"))
        grammar, how = Grammar.regex("[ac]{4}"), {"temperature": 2.0, "seed": seed}
        stream = ask(on, thinking, grammar=grammar, **how).wait()
        assert stream.reason is FinishReason.STOP
        text = stream.text()
        thinks = text.lstrip()[0] in "bT"
        assert re.fullmatch("[ac]{4}", text.partition(END)[2].strip() if thinks else text)
        found.add(thinks)
    assert found == {False, True}


def test_both_may_begin_alike(on: Engine) -> None:
    """Until it is clear which it is."""
    texts = set()
    for seed in range(8):
        stream = ask(
            on,
            within(0, begins=("<a>",)),
            grammar=Grammar.choice(["<b>", "<a"]),
            logit_bias=((on.encode(">", special=False)[0], 50.0),),  # to what only a thought is
            **{"temperature": 3.0, "seed": seed},
        ).wait()
        assert stream.reason is FinishReason.STOP
        texts.add(stream.text())
    assert texts <= {"<b>", "<a", f"<a>\n{END}\n<b>", f"<a>\n{END}\n<a"}
    assert len(texts) > 1 and any(END in text for text in texts)


def test_what_is_wrong_is_refused(on: Engine) -> None:
    with pytest.raises(InvalidRequest, match="thinking_token_budget: must be at least 0"):
        within(-1)
    with pytest.raises(InvalidRequest, match=r"thinking\.close"):
        ask(on, Thinking((END,), (), (VOCAB,), 1))


WORDS = st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "a", "ü"])


@settings(deadline=None)
@given(st.lists(WORDS, max_size=10).map("".join), st.booleans(), st.integers(0, 10**6))
def test_the_engine_and_the_server_see_the_same_thought(text: str, opened: bool, seed: int) -> None:
    begins, ends = ("<think>",), (END,)
    parser = TaggedParser(begins, ends, opened=opened)
    said = whole([*parser.feed(text), *parser.finish()])
    draws, tokens = random.Random(seed), []
    at = 0
    while at < len(text):  # however it is cut into tokens
        size = draws.randint(1, 4)
        tokens += TOKENIZER.encode(text[at : at + size], special=False)
        at += size
    span = ThoughtSpan(Thinking(ends, () if opened else begins), TOKENIZER.piece)
    count = ThoughtCount(span)
    count.feed(tokens)
    thought = TOKENIZER.decode(tokens[: count.tokens])
    if said.reasoning:
        assert said.reasoning in thought and count.tokens
    if opened or (text.lstrip().startswith("<think>")):
        assert END not in thought.removesuffix(END)[: -len(END)] or thought.endswith(">")
    else:
        assert not count.tokens and said.content == text


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(0, 6), st.booleans(), st.booleans())
def test_along_a_draft_as_one_by_one(seed: int, budget: int, held: bool, opened: bool) -> None:
    compiled = GRAMMARS.compile(Grammar.regex("(once|<b>) [a-z]{2,9}"))
    thinking = within(budget, ".", "<a", begins=() if opened else ("o", "<b"))
    grammar = (lambda: compiled.matcher(ignore_eos=False)) if held else None

    def fed(tokens: list[int]) -> ThinkingMatcher:
        made = ThinkingMatcher(thinking, TOKENS, grammar)
        for token in tokens:
            made.feed(token)
        return made

    draws, known = random.Random(seed), list[int]()
    for _ in range(draws.randint(0, 8)):
        choice = allowed(fed(known).mask())
        if not choice:
            break
        known.append(draws.choice(choice))
        if fed(known[:-1]).feed(known[-1]):
            known.pop()
            break
    draft = list(known)
    for _ in range(4):
        choice = allowed(fed(draft).mask()) or [5]
        draft.append(draws.choice([draws.choice(choice), draws.randrange(VOCAB)]))
    draft = draft[len(known) :]
    matcher = fed(known)
    masks = matcher.masks_along(draft)
    assert len(masks) == len(draft) + 1
    for place, mask in enumerate(masks):
        if mask is not None:
            assert allowed(mask) == allowed(fed([*known, *draft[:place]]).mask())
    valid = matcher.valid_prefix(draft)
    for place in range(valid):
        assert draft[place] in allowed(fed([*known, *draft[:place]]).mask())
    forced = matcher.forced(4)
    for place, token in enumerate(forced):
        assert allowed(fed([*known, *forced[:place]]).mask()) == [token]
    assert allowed(matcher.mask()) == allowed(fed(known).mask()), "it is where it was"
