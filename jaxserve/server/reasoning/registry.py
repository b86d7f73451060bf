"""How models write thoughts: formats by name, recognised in the chat template's source."""

from __future__ import annotations

import enum
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeVar

from jaxserve.config import ConfigError
from jaxserve.sched.request import Thinking
from jaxserve.server.reasoning.parser import ReasoningParser

NONE = "none"
"""Thoughts are not separated from the rest of the text."""


class Calls(enum.Enum):
    """Whether an answer has calls of tools."""

    NONE = enum.auto()
    SOME = enum.auto()
    ONLY = enum.auto()


class Span(NamedTuple):
    """Where a thought is in a text.

    Attributes:
        begins: texts that open it; none if it is open from the beginning.
        ends: texts that close it.
        close: text that is forced to close it.
        instead: text that is forced if it may not even begin; "" if it is the same as `close`.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    close: str
    instead: str = ""

    def thinking(self, encode: Callable[..., list[int]], budget: int | None) -> Thinking:
        """The engine's form of the span.

        Args:
            encode: makes token ids of a text.
            budget: the most tokens of the thought; None for any number.

        Raises:
            InvalidRequest: If the budget is negative, or the model has no tokenizer.
        """
        text = self.close if budget else self.instead or self.close
        close = () if budget is None else tuple(encode(text, special=False))
        return Thinking(self.ends, self.begins, close, budget)


class ReasoningFormat(ABC):
    """How a family of models writes what it thinks before it answers.

    Attributes:
        name: as `server.reasoning_format` has it.
        signs: texts of which a chat template for this format contains at least one.
        rank: formats of lower rank are tried first.
        markers: texts around thoughts, which may be special tokens of the model.
        history: field of a message in which chat templates look for thoughts.
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]]
    rank: ClassVar[int] = 0
    markers: ClassVar[tuple[str, ...]]
    history: ClassVar[str] = "reasoning_content"

    @abstractmethod
    def parser(self, prompt: str) -> ReasoningParser | None:
        """A parser for the text of one continuation; None if it has no thoughts.

        Args:
            prompt: the text that is continued, as rendered by the template.
        """

    @abstractmethod
    def span(self, prompt: str, calls: Calls = Calls.NONE) -> Span | None:
        """Where the thought is in the text; None if it has none.

        Args:
            prompt: likewise.
            calls: whether the answer may have calls of tools.
        """


F = TypeVar("F", bound=type[ReasoningFormat])
_FORMATS: dict[str, type[ReasoningFormat]] = {}


def register(form: F) -> F:
    """Registers a format by its name."""
    _FORMATS[form.name] = form
    return form


def formats() -> Mapping[str, type[ReasoningFormat]]:
    """All formats, by name."""
    package = importlib.import_module("jaxserve.server.reasoning.formats")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return _FORMATS


def find_format(source: str, name: str = "") -> ReasoningFormat | None:
    """The format of a chat template; None if it has no sign of any format.

    Args:
        source: the template's source; empty without one.
        name: the format's name, if it is given; `auto` and "" look for signs in the source, and
            `none` is None.

    Raises:
        ConfigError: If there is no format with this name.
    """
    known = formats()
    if name == NONE:
        return None
    if name not in ("", "auto"):
        if name not in known:
            names = ", ".join([NONE, *sorted(known)])
            raise ConfigError(f"server.reasoning_format: must be auto, {names}; got {name!r}")
        return known[name]()
    for form in sorted(known.values(), key=lambda known_form: (known_form.rank, known_form.name)):
        if any(sign in source for sign in form.signs):
            return form()
    return None
