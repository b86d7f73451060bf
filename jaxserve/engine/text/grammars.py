"""Text that is what a grammar says: which tokens may come next, for each continuation.

llguidance (https://github.com/guidance-ai/llguidance) parses grammars and makes the masks. It is
imported with the first grammar that comes.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.engine.device.sampling import mask_words
from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

CACHED = 256  # grammars
# White space between two parts of JSON ends: a model may else write nothing but that.
_JSON: JsonCompileOptions = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}",
    # A keyword that is not known is an error, whatever the schema itself says of that.
    "lenient": False,
    "coerce_one_of": False,
}
# What a grammar may take, in llguidance's units: a fraction of a second for the first mask, and
# milliseconds for each of the others, which the engine's thread makes.
_COMPILE_FUEL, _STEP_FUEL = 300_000, 50_000
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_META = frozenset(r"\.+*?()|[]{}^$")


class GrammarMatcher:
    """The state of one continuation in its grammar: a `Matcher`.

    Args:
        matcher: at the grammar's beginning.
        keep: mask of the tokens that ever may follow.
        start: another one there, which stays there.
    """

    def __init__(self, matcher: LLMatcher, keep: np.ndarray, start: LLMatcher) -> None:
        self._matcher, self._keep, self._start = matcher, keep, start
        self._fed = array("i")

    def holds(self, ahead: int) -> bool:
        """See `Matcher`."""
        return True

    def feed(self, token: int) -> bool:
        """See `Matcher`."""
        self._fed.append(token)
        self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> np.ndarray | None:
        """See `Matcher`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        allowed = bits[: len(self._keep)] & self._keep
        return allowed if allowed.any() and not self._matcher.is_error() else None

    def masks_along(self, tokens: Sequence[int]) -> list[np.ndarray | None]:
        """See `Matcher`."""
        masks = [self.mask()]
        for token in tokens:
            allowed = masks[-1]
            # A second end would be taken, and could not be taken back.
            if allowed is None or not has(allowed, token) or self._matcher.is_stopped():
                break
            self._matcher.consume_token(token)
            masks.append(self.mask())
        self._take_back(len(masks) - 1)
        return masks + [None] * (len(tokens) + 1 - len(masks))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """See `Matcher`."""
        valid = 0
        for token in tokens:
            # What is unknown to the library would be the matcher's end.
            if self._matcher.is_stopped() or not has(self._keep, token):
                break
            # Where bytes are forced, the mask has only the token by which a tokenizer writes them.
            forced = self._matcher.compute_ff_tokens()
            if token != forced[0] if forced else not self._matcher.validate_tokens([token]):
                break
            self._matcher.consume_token(token)
            valid += 1
        self._take_back(valid)
        return valid

    def forced(self, most: int) -> list[int]:
        """See `Matcher`."""
        tokens: list[int] = []
        while len(tokens) < most:
            # What comes after the first may be other tokens once that one is taken.
            forced = self._matcher.compute_ff_tokens()
            if not forced or not has(self._keep, forced[0]):
                break
            self._matcher.consume_token(forced[0])
            tokens.append(forced[0])
        self._take_back(len(tokens))
        return tokens

    def _take_back(self, tokens: int) -> None:
        """Back to the state before the last `tokens`. A copy would be as right, and takes 17 us
        for each 1,000 tokens of the text."""
        if not tokens:
            return
        if self._matcher.is_error():  # which it cannot leave: they may never come
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._fed.tolist())
        else:
            self._matcher.rollback(tokens)

    @property
    def problem(self) -> str:
        """See `Matcher`."""
        if self._matcher.is_error():
            return f"the grammar got too complex here: {_one_line(self._matcher.get_error())}"
        if self._matcher.is_accepting():
            return ""
        return "the grammar allows none of this model's tokens here"


class CompiledGrammar:
    """A grammar compiled for a model's tokens. `matcher` starts a continuation. Thread-safe.

    Args:
        matcher: at the grammar's beginning.
        keep: mask of the tokens that ever may follow, without end-of-sequence tokens.
        keep_ends: likewise, with the model's end-of-sequence tokens.
    """

    def __init__(self, matcher: LLMatcher, keep: np.ndarray, keep_ends: np.ndarray) -> None:
        self._matcher, self._keep, self._keep_ends = matcher, keep, keep_ends

    def matcher(self, *, ignore_eos: bool) -> GrammarMatcher:
        """A matcher at the beginning. ignore_eos: never allow end-of-sequence tokens."""
        keep = self._keep if ignore_eos else self._keep_ends
        return GrammarMatcher(self._matcher.deep_copy(), keep, self._matcher)


class Grammars:
    """Compiles grammars for a model's tokens, and keeps the last `CACHED`. Thread-safe.

    Args:
        definition: content of the tokenizer.json; None if there is none.
        vocab_size: tokens of the vocabulary.
        eos_ids: tokens that may end a text.
    """

    def __init__(self, definition: str | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._definition, self._vocab_size, self._eos_ids = definition, vocab_size, eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()

    def __len__(self) -> int:
        """Number of kept grammars."""
        return len(self._compiled)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar. Takes up to about a second without holding the interpreter, or
        nothing if it is kept. Raises InvalidRequest, with the reason, if it is malformed,
        unsupported, too complex, or allows no text."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                return found
        if self._definition is None:
            raise InvalidRequest(grammar.field_name, "this model has no tokenizer to apply it to")
        made = self._compile(grammar, self._loaded(self._definition))
        with self._lock:
            self._compiled[grammar] = made
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        return made

    def _loaded(self, definition: str) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                ends = list(self._eos_ids) or None
                try:
                    self._tokenizer = LLTokenizer(definition, self._vocab_size, eos_token=ends)
                except ValueError:  # it has tokens that the model has not; no mask will have them
                    self._tokenizer = LLTokenizer(definition, eos_token=ends)
            return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar)
        except ValueError as error:
            raise InvalidRequest(grammar.field_name, _one_line(str(error))) from None
        limits = LLParserLimits(
            initial_lexer_fuel=_COMPILE_FUEL, step_lexer_fuel=_STEP_FUEL, verbose_errors=False
        )
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(grammar.field_name, _one_line(matcher.get_error()))
        keep = np.full(mask_words(self._vocab_size), -1, np.int32).view(np.uint32)
        keep = _without(keep, range(self._vocab_size, 32 * len(keep)))
        ends = [token for token in tokenizer.eos_tokens if token < self._vocab_size]
        others = [token for token in ends if token not in self._eos_ids]
        made = CompiledGrammar(matcher, _without(keep, ends), _without(keep, others))
        # The first mask takes longest: here, and not on the engine's thread.
        first = GrammarMatcher(matcher, _without(keep, ends), matcher)
        if first.mask() is None:
            problem = first.problem or "allows no text but the empty one"
            raise InvalidRequest(grammar.field_name, problem)
        return made


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher

    text = grammar.text
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case GrammarKind.JSON_SCHEMA:
            if text.strip() == "false":
                raise ValueError("nothing is valid by it")
            text = "{}" if text.strip() == "true" else text
            return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(_ESCAPED.sub(_as_ecma, text))
        case GrammarKind.CHOICE:
            choices: list[str] = json.loads(text)
            return LLMatcher.grammar_from_regex("|".join(map(_literal, choices)))
        case GrammarKind.LARK:
            return _with_schemas(**json.loads(text))


def _with_schemas(lark: str, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    """The grammar that begins with the Lark rules."""
    named = [
        {"name": name, "json_schema": {**schema, "x-guidance": _JSON}}
        for name, schema in schemas.items()
    ]
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *named]})


def _as_ecma(escaped: re.Match[str]) -> str:
    r"""\d and \w, and their opposites, as ECMAScript has them, ASCII: the library takes those of
    every script, but in a schema's pattern. What it reads may have classes within classes."""
    return _CLASSES.get(escaped[0], escaped[0])


def _literal(text: str) -> str:
    return "".join(f"\\{char}" if char in _META else char for char in text)


def _without(mask: np.ndarray, tokens: Sequence[int] | range) -> np.ndarray:
    """The mask with these tokens' bits cleared."""
    mask = mask.copy()
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << token % 32)
    return mask


def has(mask: np.ndarray, token: int) -> bool:
    """Whether the mask allows the token."""
    return 0 <= token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)


def _one_line(problem: str) -> str:
    """A parser's message, which may be long and drawn over several lines."""
    lines = [line.strip() for line in problem.splitlines()]
    text = " ".join(line for line in lines if line and set(line) - set("^ |"))
    return text if len(text) <= 300 else f"{text[:297]}..."
