"""Small tokenizers of the two common makes, trained on the spot (well under a second)."""

from __future__ import annotations

import functools

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXTS = (
    "Once upon a time there was a small fox who lived near the old mill. ",
    "Es war einmal ein kleiner Fuchs, der wohnte über dem Bächlein; façade, naïve, œuvre. ",
    "むかしむかし、あるところに小さな狐がいました。水車小屋の近くです。",
    "从前有一只小狐狸，住在老磨坊旁边。 Жила-была лиса. 🦊🏡 👩‍👩‍👧 🇺🇳 e\u0301 \u200d ",
    "  two  spaces,\ttabs\n\nand newlines\r\n",
)


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2's make, with `</s>` (special, first of every prompt) and `<tool>` (not special)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool é>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        "</s> $A", special_tokens=[("</s>", 1)]
    )
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """SentencePiece's make, as Llama 2 and Mistral have it: a mark for spaces, bytes for characters
    outside the vocabulary, the first space dropped in decoding."""
    words = ["▁Once", "▁upon", "▁a", "▁time", "▁", "fox", "▁fox", "es", "é", "水", "ing", "!", "\n"]
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += [word for word in words if word not in vocab]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocab)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def allowed(mask: np.ndarray | None) -> list[int]:
    """The tokens of a grammar's mask."""
    if mask is None:
        return []
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
