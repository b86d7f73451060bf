"""Rewrites turns that a chat template loses or refuses into turns that it supports.

To find out, each template first renders a few short chats once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Rendered = Callable[[Sequence[Sequence[Message]]], Sequence[str | None]]
_INSTRUCTIONS = ("system", "developer")
_FIRST, _SECOND = "mark12345", "mark67890"
_QUOTED = re.compile(r"""(['"])developer\1""")
_USER: Message = {"role": "user", "content": "Hi"}
_SAID: Message = {"role": "assistant", "content": "Yes"}
_ORDERS = (
    ("developer", "user"),
    ("system", "developer", "user"),
    ("system", "system", "user"),
    ("user", "assistant", "developer", "user"),
    ("user", "assistant", "system", "user"),
)
_CALL: Message = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
_ID = "call12345"  # some templates want nine letters and digits
_RESULT: Message = {"role": "tool", "name": "f", "tool_call_id": _ID, "content": _FIRST}
_SILENT: Message = {"role": "assistant", "content": ""}
_CALLING: Message = {**_SILENT, "tool_calls": [{"id": _ID, **_CALL}]}
_CALLED, _UNCALLED = [_USER, _CALLING, _RESULT], [_USER, _SILENT, _RESULT]


class TemplateTurns:
    """How a template treats turns.

    Args:
        source: the template's source.
        rendered: the texts of the short chats; None for a chat that it rejects.

    Attributes:
        has_calls: whether the template renders calls in a chat without tools.
        lose_calls: whether it leaves out calls or their results.
    """

    def __init__(self, source: str, rendered: Rendered) -> None:
        *texts, called, uncalled = rendered([*map(_chat, _ORDERS), _CALLED, _UNCALLED])
        alone, beside, several, later, later_system = (
            text is not None and all(mark in text for mark in _marks(order))
            for text, order in zip(texts, _ORDERS, strict=True)
        )
        # A template that writes any role as it is was not made for roles that it does not name.
        self._knows = alone and _QUOTED.search(source) is not None
        self._beside, self._several = self._knows and beside, several
        self._later = {"developer": self._knows and later, "system": later_system}
        if called is None:  # if its source mentions calls, its error message helps
            self.has_calls = "tool_calls" in source
        else:
            self.has_calls = called != uncalled
        self.lose_calls = not self.has_calls or (called is not None and _FIRST not in called)

    def placed(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The chat with its instructions where the template supports them. The role developer
        becomes system if the template knows only that; instructions that it would lose are merged
        into the first ones."""
        if not any(_instructs(message) for message in messages[1:]) and not (
            messages and messages[0]["role"] == "developer" and not self._knows
        ):
            return messages
        behind = (n for n, message in enumerate(messages) if not _instructs(message))
        lead = next(behind, len(messages))
        first, rest = list(messages[:lead]), list[Message]()
        lost = len(first) > 1 and not self._has_several(first)
        for message in messages[lead:]:
            role = self._later_role(message["role"]) if _instructs(message) else message["role"]
            if role:
                rest.append(_as(role, message))
            else:
                first.append(message)
                lost = True
        if lost:
            texts = filter(None, (message["content"] for message in first))
            first = [{**first[0], "content": "\n\n".join(texts)}]
        return [*(_as(self._role(message["role"]), message) for message in first), *rest]

    def _role(self, role: str) -> str:
        return role if self._knows else "system"

    def _has_several(self, first: Sequence[Message]) -> bool:
        if all(message["role"] == "system" for message in first):
            return self._several
        return self._beside

    def _later_role(self, role: str) -> str:
        """The role for instructions after other turns; "" if the template supports none."""
        return next((name for name in (role, "system") if self._later[name]), "")


def _chat(order: Sequence[str]) -> list[Message]:
    """A chat with turns of these roles; turns with instructions contain the marks."""
    marks, others = iter((_FIRST, _SECOND)), {"user": _USER, "assistant": _SAID}
    return [others.get(role) or {"role": role, "content": next(marks)} for role in order]


def _marks(order: Sequence[str]) -> Sequence[str]:
    return (_FIRST, _SECOND)[: sum(role in _INSTRUCTIONS for role in order)]


def _as(role: str, message: Message) -> Message:
    return message if message["role"] == role else {**message, "role": role}


def _instructs(message: Message) -> bool:
    return message["role"] in _INSTRUCTIONS
