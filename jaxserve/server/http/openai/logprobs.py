"""Log-probabilities in the two formats of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import TokenLogprobs
from jaxserve.server.requests.engine_client import EngineClient

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """Log-probabilities of one continuation of a completion: lists by token, with each token's
    offset in the text, in characters. All tokens of a multi-token character have the offset of that
    character.

    Args:
        engine: decodes the tokens.
        prompt: the tokens that are continued.
        echo: whether the text begins with the prompt. Its first token has no log-probability.
    """

    def __init__(self, engine: EngineClient, prompt: Sequence[int], echo: bool = False) -> None:
        self._engine = engine
        self._text = engine.detokenizer(() if echo else prompt)
        self._first = prompt[0] if echo else None
        self._offset = 0

    def as_dict(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The object for the next tokens."""
        lists: dict[str, list[Any]] = {name: [] for name in LISTS}
        if self._first is not None:
            self._add(lists, self._first, None, None)
            self._first = None
        for entry in entries:
            chosen = entry.token_id, entry.logprob
            # Up to k + 1 entries, as in OpenAI's API: the sampled token is always among them.
            others = () if any(token == chosen[0] for token, _ in entry.top) else (chosen,)
            self._add(lists, *chosen, self._by_text((*entry.top, *others)))
        return lists

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Alternatives by text. If tokens have the same text, the less likely ones are named by
        their ids."""
        by_text: dict[str, float] = {}
        for token, value in top:
            text = token_text(self._engine, token)
            by_text[f"token_id:{token}" if text in by_text else text] = value
        return by_text

    def _add(self, lists: dict[str, list[Any]], token: int, *known: Any) -> None:
        text = token_text(self._engine, token)
        for name, value in zip(LISTS, (text, *known, self._offset), strict=True):
            lists[name].append(value)
        self._offset += len(self._text.feed((token,)))


def chat_logprobs(engine: EngineClient, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object for a chat: one entry per token."""
    content = []
    for entry in entries:
        top = [_chat_entry(engine, token, value) for token, value in entry.top]
        content.append({**_chat_entry(engine, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_text(engine: EngineClient, token_id: int) -> str:
    """The text of a single token; bytes that are not a whole character are written as OpenAI writes
    them."""
    piece = engine.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(engine: EngineClient, token_id: int, logprob: float) -> dict[str, Any]:
    piece = engine.token_bytes(token_id)
    return {"token": token_text(engine, token_id), "logprob": logprob, "bytes": list(piece)}
