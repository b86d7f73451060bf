"""A policy's parameters and their values as text.

They are the fields of the policy's dataclass. Numbers, switches and members of enumerations can be
set from text; the others (groups, keys) only in Python.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

NONE = "none"  # None as text
# Properties that a policy declares about itself cannot be set by users.
_DECLARED = ("hypothetical", "moves_cache", "speculates", "steady")
_MOST = 2**63 - 1  # limit of int64 arrays


@dataclass(frozen=True)
class Parameter:
    """A policy parameter that can be set from text.

    Attributes:
        name: The field of the policy's dataclass.
        kind: float, int, bool or an enumeration.
        optional: Whether it may be None.
        default: The policy's own value.
    """

    name: str
    kind: type
    optional: bool
    default: Any

    def __str__(self) -> str:
        """`name=default`, as text that sets it."""
        return f"{self.name}={text_of(self.default)}"

    def check(self, value: Any) -> Any:
        """Returns the value, parsed if it is text, if the parameter takes it. ValueError names the
        parameter and the values that it takes."""
        text, words = value if isinstance(value, str) else None, self._words()
        if self.optional and (value is None or (text or "").lower() == NONE):
            return None
        if text is not None:
            value = words.get(text.lower()) if words else self._number(text)
        elif self.kind is float and type(value) is int:
            value = float(value) if abs(value) <= _MOST else math.inf
        fits = type(value) is self.kind
        if fits and self.kind in (float, int):
            fits = math.isfinite(value) if self.kind is float else abs(value) <= _MOST
        if not fits:
            raise self._refused(value if text is None else text)
        return value

    def _words(self) -> dict[str, Any]:
        """The values that have names."""
        if self.kind is bool:
            return {"true": True, "false": False}
        members: Mapping[str, Any] = getattr(self.kind, "__members__", {})
        return {name.lower(): member for name, member in members.items()}

    def _number(self, text: str) -> Any:
        try:
            return self.kind(text)
        except ValueError:
            return None

    def _refused(self, value: Any) -> ValueError:
        numbers = {float: "a number", int: "a whole number below 2**63", bool: "true or false"}
        takes = numbers.get(self.kind) or f"one of {', '.join(self._words())}"
        orelse = f" or {NONE}" if self.optional else ""
        return ValueError(f"{self.name} must be {takes}{orelse}, got {value!r:.60}")


def parameters(policy: object) -> dict[str, Parameter]:
    """Parameters that can be set from text, by name, in the order of their definition."""
    found = {}
    for name in _fields(policy):
        kind, optional = _kind(policy, name)
        if kind is not None and name not in _DECLARED:
            found[name] = Parameter(name, kind, optional, getattr(policy, name))
    return found


_Made = TypeVar("_Made")  # a policy, or what is made by name as policies are


def with_parameters(
    name: str, policy: _Made, values: Mapping[str, Any], what: str = "policy"
) -> _Made:
    """The policy with other values; text is converted.

    Args:
        name: Name of the policy, for messages.
        policy: A policy, or another dataclass with parameters.
        values: The new values by name.
        what: Kind of the object, for messages.

    Raises:
        ValueError: There is no such parameter, it cannot be set from text, or a value is wrong.
    """
    if not values:
        return policy
    known, fields = parameters(policy), _fields(policy)
    checked = {}
    for wanted, value in values.items():
        if wanted not in fields:
            raise ValueError(f"{what} {name!r} has no parameter {wanted!r}{_hint(wanted, known)}")
        if wanted not in known and (isinstance(value, str) or wanted in _DECLARED):
            raise ValueError(
                f"{what} {name!r}: {wanted} cannot be set from text{_hint(wanted, known)}"
            )
        try:
            checked[wanted] = known[wanted].check(value) if wanted in known else value
        except ValueError as error:
            raise ValueError(f"{what} {name!r}: {error}") from None
    try:
        changed: _Made = dataclasses.replace(policy, **checked)  # type: ignore[type-var]
    except ValueError as error:  # from a policy that checks its own values
        raise ValueError(f"{what} {name!r}: {error}") from error
    if getattr(policy, "speculates", False):  # a variant has set it, and it is not a field
        object.__setattr__(changed, "speculates", True)
    return changed


def text_of(value: Any) -> str:
    """A parameter's value as text that `Parameter.check` reads."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)


def _fields(policy: object) -> list[str]:
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        return []
    return [field.name for field in dataclasses.fields(policy) if field.init]


def _kind(policy: object, name: str) -> tuple[type | None, bool]:
    """The type that text is converted to, None if there is none; and whether None is a value."""
    hint = _annotation(type(policy), name)
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else None
    plain = isinstance(hint, type) and (hint in (float, int, bool) or issubclass(hint, enum.Enum))
    return (hint if plain else None), optional


def _annotation(cls: type, name: str) -> Any:
    """A field's type; None if its module cannot resolve it, as for a name that only checkers
    import."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    hint = inspect.get_annotations(owner)[name]
    if not isinstance(hint, str):
        return hint
    try:
        return eval(hint, vars(sys.modules[owner.__module__]))
    except (NameError, AttributeError, TypeError, KeyError):
        return None


def _hint(wanted: str, known: Mapping[str, Parameter]) -> str:
    if not known:
        return "; it has none"
    near = difflib.get_close_matches(wanted, known, n=1)
    maybe = f"; did you mean {near[0]}?" if near and wanted not in known else "."
    return f"{maybe} It has {', '.join(map(str, known.values()))}"
