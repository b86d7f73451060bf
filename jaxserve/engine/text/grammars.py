"""Grammars for text: which tokens may come next, for each continuation."""

from __future__ import annotations

import functools
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.engine.device.sampling import mask_words
from jaxserve.engine.text.grammar_process import GrammarLimits, GrammarProcesses
from jaxserve.engine.text.grammar_source import make_matcher, make_tokenizer, one_line
from jaxserve.sched.request import Grammar, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_SLOW = 256  # that are remembered
_LEAST = 4096  # bytes of any grammar, in addition to the compiler's


class GrammarMatcher:
    """The state of one continuation in its grammar: a `Matcher`.

    Args:
        matcher: a matcher at the grammar's beginning.
        keep: mask of the tokens that are ever allowed.
        start: another matcher at the beginning, which stays there.
        limits: limits of its masks.
        on_breach: called when masks take longer, which ends the text.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        keep: np.ndarray,
        start: LLMatcher,
        limits: GrammarLimits,
        on_breach: Callable[[], None],
    ) -> None:
        self._matcher, self._keep, self._start = matcher, keep, start
        self._fed = array("i")
        self._limits, self._on_breach = limits, on_breach
        self._masks, self._took, self._late = 0, 0.0, False

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
        if self._late:
            return None
        with self._timed():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        self._masks += 1
        allowed = bits[: len(self._keep)] & self._keep
        return allowed if allowed.any() and not self._matcher.is_error() else None

    def masks_along(self, tokens: Sequence[int]) -> list[np.ndarray | None]:
        """See `Matcher`."""
        masks = [self.mask()]
        for token in tokens:
            allowed = masks[-1]
            # A second end token would be accepted, and could not be taken back.
            if allowed is None or not has(allowed, token) or self._matcher.is_stopped():
                break
            self._matcher.consume_token(token)
            masks.append(self.mask())
        self._take_back(len(masks) - 1)
        return masks + [None] * (len(tokens) + 1 - len(masks))

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """See `Matcher`."""
        if self._late:
            return 0
        valid = 0
        for token in tokens:
            # A token that the library does not know would end the matcher.
            if self._matcher.is_stopped() or not has(self._keep, token):
                break
            # If bytes are forced, the mask has only the token with which a tokenizer writes them.
            with self._timed():
                forced = self._matcher.compute_ff_tokens()
                fits = (
                    token == forced[0] if forced else bool(self._matcher.validate_tokens([token]))
                )
            if not fits:
                break
            self._matcher.consume_token(token)
            valid += 1
        self._take_back(valid)
        return valid

    def forced(self, most: int) -> list[int]:
        """See `Matcher`."""
        tokens: list[int] = []
        while len(tokens) < most and not self._late:
            # The tokens after the first may change once that one is taken.
            with self._timed():
                forced = self._matcher.compute_ff_tokens()
            if not forced or not has(self._keep, forced[0]):
                break
            self._matcher.consume_token(forced[0])
            tokens.append(forced[0])
        self._take_back(len(tokens))
        return tokens

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Times every query for allowed tokens, since the engine's thread does them for all
        requests. CPU time, so that it does not depend on other work."""
        begin = time.thread_time()
        yield
        self._took += time.thread_time() - begin
        if self._took > self._limits.mask_s(self._masks) and not self._late:
            self._late = True
            self._on_breach()

    def _take_back(self, tokens: int) -> None:
        """Goes back to the state before the last `tokens` tokens. A copy would do as well, but
        takes 17 us for each 1,000 tokens of the text."""
        if not tokens:
            return
        if self._matcher.is_error():  # a permanent state, but the tokens may never come
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._fed.tolist())
        else:
            self._matcher.rollback(tokens)

    @property
    def problem(self) -> str:
        """See `Matcher`."""
        if self._late:
            return f"the grammar {self._limits.mask_problem}"
        if self._matcher.is_error():
            return f"the grammar got too complex here: {one_line(self._matcher.get_error())}"
        if self._matcher.is_accepting():
            return ""
        return "the grammar allows none of this model's tokens here"


class CompiledGrammar:
    """A grammar compiled for a model's tokens. `matcher` starts a continuation. Thread-safe.

    Args:
        matcher: at the grammar's beginning.
        keep: mask of the tokens that are ever allowed, without end-of-sequence tokens.
        keep_ends: the same with the model's end-of-sequence tokens.
        limits: limits of masks.
        on_breach: called with the tenant by the matcher of each continuation whose masks take
        longer.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        keep: np.ndarray,
        keep_ends: np.ndarray,
        limits: GrammarLimits,
        on_breach: Callable[[str], None],
    ) -> None:
        self._matcher, self._keep, self._keep_ends = matcher, keep, keep_ends
        self._limits, self._on_breach = limits, on_breach

    def matcher(self, *, ignore_eos: bool, tenant: str = "") -> GrammarMatcher:
        """A matcher at the beginning. ignore_eos: never allow end-of-sequence tokens."""
        keep, copy = self._keep if ignore_eos else self._keep_ends, self._matcher.deep_copy()
        on_breach = functools.partial(self._on_breach, tenant)
        return GrammarMatcher(copy, keep, self._matcher, self._limits, on_breach)


@dataclass(frozen=True)
class _Kept:
    """The result for a grammar, and its bytes: compiled, or why it is refused."""

    made: CompiledGrammar | str
    size: int


class Grammars:
    """Compiles grammars for a model's tokens, and keeps the latest ones. Thread-safe.

    Args:
        definition: content of the tokenizer.json; None if there is none.
        vocab_size: tokens of the vocabulary.
        eos_ids: tokens that may end a text.
        limits: limits of grammars.

    Attributes:
        breaches: texts that ended because of the time of their grammar.
    """

    def __init__(
        self,
        definition: str | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self._definition, self._vocab_size, self._eos_ids = definition, vocab_size, eos_ids
        self._limits = limits or GrammarLimits()
        self._tokenizer: LLTokenizer | None = None
        self._processes = (
            None
            if definition is None
            else GrammarProcesses(definition, vocab_size, eos_ids, self._limits)
        )
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._slow: dict[tuple[str, Grammar], None] = {}  # grammars that were too slow
        self._size, self.breaches = 0, 0
        self._lock, self._loading = threading.Lock(), threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept grammars."""
        return self._size

    def close(self) -> None:
        """Ends running compilations. Idempotent."""
        if self._processes is not None:
            self._processes.close()

    def known(self, grammar: Grammar) -> bool:
        """Whether the grammar is kept, compiled or refused; it then becomes the latest one."""
        return self._found(grammar) is not None

    def check(self, grammar: Grammar, tenant: str) -> None:
        """Raises InvalidRequest if a text of this tenant was too slow in this grammar. Speed also
        depends on the prompt, so this says nothing about other tenants' texts."""
        if (tenant, grammar) in self._slow:
            raise InvalidRequest(grammar.field_name, self._limits.mask_problem)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The compiled grammar, at once if it is kept. Other grammars do not wait for it.

        Raises:
            InvalidRequest: it is malformed, unsupported, exceeds a limit, or allows no text; the
            message says which.
            EngineStopped: after `close`.
            QueueFull: no process can be started to try it.
        """
        found = self._found(grammar)
        if found is None:
            if self._definition is None or self._processes is None:
                problem = "this model has no tokenizer to apply it to"
                raise InvalidRequest(grammar.field_name, problem)
            if self._tokenizer is None:  # while the process reads its own
                threading.Thread(target=self._loaded, args=[self._definition], daemon=True).start()
            try:
                size = self._processes.size(grammar)
                made = self._compile(grammar, self._loaded(self._definition))
            except InvalidRequest as error:
                found = _Kept(error.problem, 0)
            else:
                found = _Kept(made, size)
            self._keep(grammar, found)
        if isinstance(found.made, str):
            raise InvalidRequest(grammar.field_name, found.made)
        return found.made

    def _found(self, grammar: Grammar) -> _Kept | None:
        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return found

    def _keep(self, grammar: Grammar, found: _Kept) -> None:
        """Keeps the result, in place of an older one. The oldest grammars make room."""
        with self._lock:
            self._drop(grammar)
            self._kept[grammar] = found
            self._size += found.size + 4 * len(grammar.text) + _LEAST
            while self._size > self._limits.kept and len(self._kept) > 1:
                self._drop(next(iter(self._kept)))

    def _drop(self, grammar: Grammar) -> None:
        if (old := self._kept.pop(grammar, None)) is not None:
            self._size -= old.size + 4 * len(grammar.text) + _LEAST

    def _breached(self, grammar: Grammar, tenant: str) -> None:
        """Refuses the tenant's further texts with this grammar."""
        self.breaches += 1
        with self._lock:
            self._slow[tenant, grammar] = None
            if len(self._slow) > _SLOW:
                del self._slow[next(iter(self._slow))]

    def _loaded(self, definition: str) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(definition, self._vocab_size, self._eos_ids)
            return self._tokenizer

    def _compile(self, grammar: Grammar, tokenizer: LLTokenizer) -> CompiledGrammar:
        matcher = make_matcher(grammar, tokenizer)
        keep = np.full(mask_words(self._vocab_size), -1, np.int32).view(np.uint32)
        keep = _without(keep, range(self._vocab_size, 32 * len(keep)))
        ends = [token for token in tokenizer.eos_tokens if token < self._vocab_size]
        others = [token for token in ends if token not in self._eos_ids]
        made = CompiledGrammar(
            matcher,
            keep=_without(keep, ends),
            keep_ends=_without(keep, others),
            limits=self._limits,
            on_breach=functools.partial(self._breached, grammar),
        )
        # The first mask takes longest, so it is made here and not on the engine's thread.
        matcher.compute_bitmask()
        first = made.matcher(ignore_eos=True)
        if first.mask() is None:
            problem = first.problem or "allows no text but the empty one"
            raise InvalidRequest(grammar.field_name, problem)
        return made


def _without(mask: np.ndarray, tokens: Sequence[int] | range) -> np.ndarray:
    """The mask with these tokens' bits cleared."""
    mask = mask.copy()
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << token % 32)
    return mask


def has(mask: np.ndarray, token: int) -> bool:
    """Whether the mask allows the token."""
    return 0 <= token < 32 * len(mask) and bool(int(mask[token // 32]) >> token % 32 & 1)
