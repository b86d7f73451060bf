"""How models write tool calls: formats by name, recognised in the chat template's source."""

from __future__ import annotations

import importlib
import pkgutil
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

from jaxserve.config import ConfigError
from jaxserve.server.tools.calls import Call, Tool
from jaxserve.server.tools.parser import CallParser
from jaxserve.server.tools.rules import Rules, literal

_ALNUM = string.ascii_letters + string.digits


class ToolFormat(ABC):
    """How a family of models writes calls.

    Args:
        source: the chat template's source, for formats with several forms; empty without one.

    Attributes:
        name: as `server.tool_format` has it.
        signs: texts of which a chat template for this format contains at least one. If all signs of
            a format are also signs of another, it comes first by `rank`.
        rank: formats of lower rank are tried first.
        markers: texts around calls, which may be special tokens of the model.
        plain_json: whether calls are JSON without a marker.
        holds_some: whether a text with optional calls can be held to a grammar.
        instructions: how to write a call, for a model whose template does not support tools.
        parser: finds the calls in the text of one continuation.
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 0
    markers: ClassVar[tuple[str, ...]] = ()
    plain_json: ClassVar[bool] = False
    holds_some: ClassVar[bool] = True
    instructions: ClassVar[str]
    parser: ClassVar[type[CallParser]]

    def __init__(self, source: str = "") -> None:
        self._source = source

    @abstractmethod
    def call(self, rules: Rules, tool: Tool, place: int) -> str:
        """The rule of one call, without its markers. place: the tool's location, for error
        messages. Raises InvalidRequest if the format cannot hold the tool's schema."""

    @abstractmethod
    def held(self, rules: Rules, parallel: bool) -> str:
        """The rule of a text of calls only. Calls match the rule `call`."""

    @abstractmethod
    def free(self, rules: Rules, parallel: bool) -> str:
        """The rule of any text. Calls in it match the rule `call`."""

    @abstractmethod
    def written(self, calls: Sequence[Call]) -> str:
        """The calls as the model writes them."""

    def id_of(self, digits: bytes) -> str:
        """The id of a call, made of twelve random bytes."""
        return f"call_{digits.hex()}"


class MarkedFormat(ToolFormat):
    """A format whose calls may stand anywhere in a text.

    Attributes:
        trigger: the marker with which they begin.
    """

    trigger: ClassVar[str]

    @abstractmethod
    def after_trigger(self, rules: Rules, parallel: bool) -> str:
        """The rule of the text after the trigger, with the rule `call`. parallel: whether several
        calls are allowed."""

    def free(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        rules.add("TEXT", "/(?s:.*)/")
        token = rules.token(self.trigger)
        begin = (
            f"TEXT {token}" if token else rules.add("begin[lazy]", f"TEXT {literal(self.trigger)}")
        )
        tagged = rules.add("tagged", f"{begin} {self.after_trigger(rules, parallel)}")
        return f"{tagged}* TEXT" if parallel else f"{tagged} | TEXT"


class LeadingFormat(ToolFormat):
    """A format whose calls stand at the beginning of a text without other content.

    Attributes:
        openers: characters that begin a call, as in a character class of a regular expression.
    """

    openers: ClassVar[str]

    def free(self, rules: Rules, parallel: bool) -> str:
        """See `ToolFormat`."""
        rules.add("TEXT", rf"/(\s*[^\s{self.openers}](?s:.*))?/")
        return f"{self.held(rules, parallel)} | TEXT"


F = TypeVar("F", bound=type[ToolFormat])
_FORMATS: dict[str, type[ToolFormat]] = {}
DEFAULT = "hermes"
"""The format if the template has no sign of any."""


def register(form: F) -> F:
    """Registers a format by its name."""
    _FORMATS[form.name] = form
    return form


def formats() -> Mapping[str, type[ToolFormat]]:
    """All formats, by name."""
    package = importlib.import_module("jaxserve.server.tools.formats")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return _FORMATS


def find_format(source: str, name: str = "") -> ToolFormat:
    """The format of a chat template.

    Args:
        source: the template's source; empty without one.
        name: the format's name, if it is given; `auto` and "" look for signs in the source.

    Raises:
        ConfigError: If there is no format with this name.
    """
    known = formats()
    if name not in ("", "auto"):
        if name not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"server.tool_format: must be auto, {names}; got {name!r}")
        return known[name](source)
    for form in sorted(known.values(), key=lambda known_form: (known_form.rank, known_form.name)):
        if any(sign in source for sign in form.signs):
            return form(source)
    return known[DEFAULT](source)


def nine_characters(digits: bytes) -> str:
    """An id of nine letters and digits, as some templates demand."""
    return "".join(_ALNUM[digit % len(_ALNUM)] for digit in digits[:9])
