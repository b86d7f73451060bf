"""A thought between two tags, as most families write it."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.server.reasoning.parser import TaggedParser
from jaxserve.server.reasoning.registry import Calls, ReasoningFormat, Span, register

_TAIL = 256  # last characters of a prompt that are searched


class Tagged(ReasoningFormat):
    """Formats with one thought at the text's beginning. Some templates open the thought at the end
    of the prompt, and also close it if the model should not think.

    Attributes:
        begins: texts that open a thought; templates write the first.
        ends: texts that close it, likewise.
        close: how the model closes it.
    """

    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]]
    close: ClassVar[str]

    def parser(self, prompt: str) -> TaggedParser | None:
        """See `ReasoningFormat`."""
        span = self.span(prompt)
        if span is None:
            return None
        return TaggedParser(self.begins, self.ends, opened=not span.begins)

    def span(self, prompt: str, calls: Calls = Calls.NONE) -> Span | None:
        """See `ReasoningFormat`."""
        end = prompt[-_TAIL:].rstrip()
        if end.endswith(self.ends):
            return None
        opened = end.endswith(self.begins)
        return Span(() if opened else self.begins, self.ends, self.close)


@register
class Think(Tagged):
    """DeepSeek R1, Qwen 3, GLM, MiniMax, SmolLM3 and many more."""

    name = "think"
    signs = ("<think>", "</think>")
    begins, ends, close = ("<think>",), ("</think>",), "\n</think>\n\n"
    markers = (*begins, *ends)


@register
class Mistral(Tagged):
    """Magistral and later models of Mistral. Earlier ones write <think>."""

    name = "mistral"
    signs = ("[THINK]",)
    begins, ends, close = ("[THINK]",), ("[/THINK]",), "[/THINK]"
    markers = (*begins, *ends)


@register
class SeedOss(Tagged):
    """Seed-OSS."""

    name = "seed_oss"
    signs = ("<seed:think>",)
    begins, ends, close = ("<seed:think>",), ("</seed:think>",), "</seed:think>"
    markers = (*begins, *ends)


@register
class Granite(Tagged):
    """Granite 3.2, which announces its thoughts in words."""

    name = "granite"
    signs = ("Here is my thought process:",)
    begins = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
    close = "\n\nHere is my response:"
    markers = ()
