"""Rows of tokens for training: stories packed one after the other, each ended by </s>."""

from __future__ import annotations

import random

import grammar
import numpy as np
from bpe import EOS_ID
from tokenizers import Tokenizer

_CUT = 0.15  # share of stories that are encoded in two pieces


def story_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """The token ids of a fresh story, without </s>.

    A prompt may end anywhere: inside a word, after a space. So some stories are cut at a random
    character and the two pieces encoded separately, as a server would.
    """
    text = grammar.story(rng.getrandbits(53))
    pieces = [text]
    if rng.random() < _CUT:
        cut = rng.randrange(1, len(text))
        pieces = [text[:cut], text[cut:]]
    encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
    return [token for piece in encoded for token in piece.ids]


def row(tokenizer: Tokenizer, key: str, length: int) -> np.ndarray:
    """int32 [length]: </s>, then stories each followed by </s>, the last one cut off.

    Depends only on `key`, so that training can continue from any step.
    """
    rng = random.Random(key)
    ids = [EOS_ID]
    while len(ids) < length:
        ids += story_ids(tokenizer, rng)
        ids.append(EOS_ID)
    return np.array(ids[:length], np.int32)


def batch(
    tokenizer: Tokenizer, key: str, rows: int, length: int, max_position: int
) -> tuple[np.ndarray, np.ndarray]:
    """A batch for training. Every other row starts at a random position, so that short rows train
    all positions.

    Args:
        tokenizer: Of the model.
        key: Decides what is in the batch.
        rows: Number of rows.
        length: Tokens of a row.
        max_position: Longest context in tokens.

    Returns:
        (tokens [rows, length + 1], positions [rows, length]), int32.
    """
    tokens = np.stack([row(tokenizer, f"{key}/{r}", length + 1) for r in range(rows)])
    offsets = np.random.default_rng(list(key.encode())).integers(
        max_position - length + 1, size=rows
    )
    offsets[::2] = 0
    return tokens, (offsets[:, None] + np.arange(length)).astype(np.int32)
