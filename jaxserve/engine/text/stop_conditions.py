"""When a continuation ends, and how much of its text may be streamed before that."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxserve.engine.output import FinishReason
from jaxserve.engine.text.detokenizer import Tokenizer
from jaxserve.engine.text.matcher import Matcher
from jaxserve.sched.request import InvalidRequest, SamplingParams


class StopStrings:
    """Searches for stop strings in text that comes in pieces, however it is cut.

    The match that completes first counts; of several that complete at the same character, the
    longest. Only text that may be the beginning of a stop string is held back.

    Attributes:
        found: the stop string that was found; "" if none was.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = self.found = ""

    def feed(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """Returns the text that can be streamed now, and whether a stop string was found. That
        string and everything after it are dropped. If not armed, stop strings that end in this
        piece are ordinary text."""
        if not self._stops:
            return text, False
        seen = len(self._held)
        text = self._held + text
        if armed:
            # Only matches that end in the new piece: earlier ones in the held part were not armed.
            starts = ((text.find(s, max(seen - len(s) + 1, 0)), len(s)) for s in self._stops)
            found = [(start + length, start) for start, length in starts if start >= 0]
            if found:
                end, start = min(found)
                self._held, self.found = "", text[start:end]
                return text[:start], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text still held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(len(s) > length and s.startswith(end) for s in self._stops):
                return length
        return 0


class ContinuationText:
    """Turns the tokens of one continuation into text and says when it ends.

    It ends with STOP at an end-of-sequence token (unless ignore_eos), a stop token id or a stop
    string, and with LENGTH at max_tokens; STOP if both apply. A stop token counts as a generated
    token and its id is reported, but it adds no text, even if it is not a special token.

    No stop condition applies to the first min_tokens tokens, except that a grammar may allow
    nothing more.

    Args:
        tokenizer: tokenizer of the model.
        sampling: gives the stop conditions.
        eos_ids: end-of-sequence tokens.
        prompt: tokens of the prompt, which the text continues.
        matcher: its state in the grammar; None without one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        eos_ids: Collection[int],
        prompt: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self._detokenizer = tokenizer.detokenizer(prompt, sampling.shown_token_ids)
        self._strings = StopStrings(sampling.stop)
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends = self._ends.union(eos_ids)
        self._min_tokens = sampling.min_tokens
        self._max_tokens = sampling.max_tokens
        self._num_tokens = 0

    @property
    def stop_string(self) -> str:
        """The stop string that has ended it; "" if none has."""
        return self._strings.found

    def feed(self, token: int) -> tuple[str, FinishReason | None]:
        """Takes the next token. Returns the text that can be streamed now, and why the continuation
        ends here, or None. Not to be called after the end."""
        self._num_tokens += 1
        armed = self._num_tokens > self._min_tokens
        ends = armed and token in self._ends
        complete = self.matcher is not None and not ends and self.matcher.feed(token)
        last = ends or complete or self._num_tokens >= self._max_tokens
        delta = "" if ends else self._detokenizer.feed((token,))
        if last:
            delta += self._detokenizer.flush()
        text, found = self._strings.feed(delta, armed=armed)
        if found:
            return text, FinishReason.STOP
        if last:
            stops = ends or complete
            return text + self._strings.flush(), FinishReason.STOP if stops else FinishReason.LENGTH
        return text, None

    def replay(self, tokens: Sequence[int]) -> tuple[str, FinishReason | None]:
        """`feed` of the tokens that another engine has generated. Raises InvalidRequest if the
        continuation ends before the last of them."""
        if not tokens:
            return "", None
        text = self._skip(tokens[:-1])
        more, reason = self.feed(tokens[-1])
        return text + more, reason

    def _skip(self, tokens: Sequence[int]) -> str:
        """`feed` of tokens that do not end it, all at once: there may be many, and others wait
        meanwhile. Raises InvalidRequest if they do."""
        armed = max(0, self._min_tokens - self._num_tokens)
        self._num_tokens += len(tokens)
        ends = not self._ends.isdisjoint(tokens[armed:]) or self._num_tokens >= self._max_tokens
        if not ends and self.matcher is not None:
            ends = any(map(self.matcher.feed, tokens))
        text = ""
        for first, end in ((0, armed), (armed, len(tokens))):
            part = "" if ends else self._detokenizer.feed(tokens[first:end])
            more, found = self._strings.feed(part, armed=first == armed)
            text, ends = text + more, ends or found
        if ends:
            raise InvalidRequest("generated", "goes on after the end")
        return text

    def flush(self) -> str:
        """The text held back, if the continuation is ended from outside."""
        text, _ = self._strings.feed(self._detokenizer.flush(), armed=False)
        return text + self._strings.flush()
