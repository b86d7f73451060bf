"""Finds thoughts in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.server.tools.calls import Content, Reasoning
from jaxserve.server.tools.parser import Steps, TextParser


class ReasoningParser(TextParser):
    """Splits text into `Reasoning` and `Content`. White space around a thought is dropped; all
    other text is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self._space: list[str] = []
        self._thinks = False

    @property
    def inside(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._thinks

    # Parts that formats are made of.

    def _think(self, text: str) -> None:
        """Passes on white space only once it is clear that it is within the thought."""
        if not self._thinks:
            text, self._thinks = text.lstrip(), bool(text.strip())
        stripped = text.rstrip()
        if stripped:
            self._pieces.append(Reasoning("".join(self._space) + stripped))
            self._space = []
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def _thought(self) -> None:
        """The thought has ended."""
        self._space, self._thinks = [], False

    def _content(self, text: str) -> None:
        if text:
            self._pieces.append(Content(text))


class TaggedParser(ReasoningParser):
    """One thought between two markers at the beginning of the text.

    Args:
        begins: texts that open it.
        ends: texts that close it.
        opened: whether the prompt has opened it.
    """

    def __init__(self, begins: Sequence[str], ends: Sequence[str], *, opened: bool) -> None:
        self._begins, self._ends, self._opened = begins, ends, opened
        super().__init__()

    def _run(self) -> Steps[None]:
        before = yield from self._skip_space()
        # Some models repeat the opening marker that is in their prompt.
        if (yield from self._literal(*self._begins)) or self._opened:
            yield from self._up_to(self._ends, self._think)
            self._thought()
            before = ""
            yield from self._skip_space()
        self._content(before)
        yield from self._up_to((), self._content)
