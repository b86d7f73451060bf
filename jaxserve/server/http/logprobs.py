"""Log-probabilities in the two shapes that OpenAI's API has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.engine.output import TokenLogprobs
from jaxserve.server.requests.contract import ServedEngine


class CompletionLogprobs:
    """Of one continuation of a completion: lists by token, with each token's place in the text."""

    def __init__(self, engine: ServedEngine, offset: int) -> None:
        """offset: characters of the text before the first token."""
        self._engine = engine
        self._offset = offset

    def of(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The object for what comes next."""
        tokens, offsets, tops = [], [], []
        for entry in entries:
            text = token_text(self._engine, entry.token_id)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            tops.append({token_text(self._engine, token): value for token, value in entry.top})
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def chat_logprobs(engine: ServedEngine, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The object of a chat: one entry a token."""
    content = []
    for entry in entries:
        top = [_chat_entry(engine, token, value) for token, value in entry.top]
        content.append({**_chat_entry(engine, entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def token_text(engine: ServedEngine, token_id: int) -> str:
    """A token by itself; bytes that are no whole character are written as OpenAI writes them."""
    piece = engine.token_bytes(token_id)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _chat_entry(engine: ServedEngine, token_id: int, logprob: float) -> dict[str, Any]:
    piece = engine.token_bytes(token_id)
    return {"token": token_text(engine, token_id), "logprob": logprob, "bytes": list(piece)}
