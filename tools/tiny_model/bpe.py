"""The byte-level BPE tokenizer of the tiny model, trained on the story grammar."""

from __future__ import annotations

from itertools import islice

import grammar
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# Ids 0, 1, 2 as in OPT's vocabulary. All 256 bytes are in the alphabet, so nothing is unknown.
SPECIAL = ("<s>", "<pad>", "</s>")
PAD_ID, EOS_ID = 1, 2
_FIRST_SEED = 1_000_000_000  # stories that are only read here


def train_tokenizer(vocab_size: int, num_stories: int = 20_000) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids that puts </s> before a text, as OPT's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stories = islice(grammar.stories(_FIRST_SEED), num_stories)
    tokenizer.train_from_iterator(stories, trainer=trainer, length=num_stories)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", EOS_ID)]
    )
    return tokenizer
