"""Log-probabilities in the two shapes that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import TokenLogprobs
from jaxserve.server.requests.engine_client import EngineClient

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """Of one continuation of a completion: lists by token, with each token's place in the text, in
    characters. A token that ends a character has the place of the character's begin, as those
    before it.

    Args:
        engine: whose tokens they are.
        prompt: the tokens that are continued.
        echo: whether the text begins with the prompt. Nothing says how likely its first token is.
    """

    def __init__(self, engine: EngineClient, prompt: Sequence[int], echo: bool = False) -> None:
        self._engine = engine
        self._text = engine.detokenizer(() if echo else prompt)
        self._first = prompt[0] if echo else None
        self._offset = 0

    def as_dict(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The object for what comes next."""
        found: dict[str, list[Any]] = {name: [] for name in LISTS}
        if self._first is not None:
            self._add(found, self._first, None, None)
            self._first = None
        for entry in entries:
            chosen = entry.token_id, entry.logprob
            # As OpenAI has it here, up to k + 1: the chosen token is always among them.
            others = () if any(token == chosen[0] for token, _ in entry.top) else (chosen,)
            self._add(found, *chosen, self._by_text((*entry.top, *others)))
        return found

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Each alternative has a name of its own: of tokens with the same text, the less likely
        ones have their ids."""
        found: dict[str, float] = {}
        for token, value in top:
            text = token_text(self._engine, token)
            found[f"token_id:{token}" if text in found else text] = value
        return found

    def _add(self, found: dict[str, list[Any]], token: int, *known: Any) -> None:
        text = token_text(self._engine, token)
        for name, value in zip(LISTS, (text, *known, self._offset), strict=True):
            found[name].append(value)
        self._offset += len(self._text.feed((token,)))


def chat_logprobs(engine: EngineClient, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object of a chat: one entry per token."""
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
