"""Log-probabilities in the two shapes that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import TokenLogprobs
from jaxserve.server.requests.engine_client import EngineClient

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """Of one continuation of a completion: lists by token, with each token's place in the text."""

    def __init__(self, engine: EngineClient, first: int | None = None) -> None:
        """first: token of the prompt, if that is echoed: nothing says how likely it is."""
        self._engine = engine
        self._first = first
        self._offset = 0

    def as_dict(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The object for what comes next."""
        found: dict[str, list[Any]] = {name: [] for name in LISTS}
        if self._first is not None:
            self._add(found, self._first, None, None)
            if not self._engine.decode([self._first]):  # a special token, which the text is without
                self._offset = 0
            self._first = None
        for entry in entries:
            top = {token_text(self._engine, token): value for token, value in entry.top}
            self._add(found, entry.token_id, entry.logprob, top)
        return found

    def _add(self, found: dict[str, list[Any]], token: int, *known: Any) -> None:
        text = token_text(self._engine, token)
        for name, value in zip(LISTS, (text, *known, self._offset), strict=True):
            found[name].append(value)
        self._offset += len(text)


def chat_logprobs(engine: EngineClient, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object of a chat: one entry a token."""
    content = []
    for entry in entries:
        top = [_chat_entry(engine, token, value) for token, value in entry.top]
        content.append({**_chat_entry(engine, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_text(engine: EngineClient, token_id: int) -> str:
    """A token by itself; bytes that are no whole character are written as OpenAI writes them."""
    piece = engine.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(engine: EngineClient, token_id: int, logprob: float) -> dict[str, Any]:
    piece = engine.token_bytes(token_id)
    return {"token": token_text(engine, token_id), "logprob": logprob, "bytes": list(piece)}
