"""What \\d and \\w of an expression are."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.engine.text.grammars import Grammars
from jaxserve.engine.text.text_limit import BYTE_OF_CHAR
from jaxserve.sched.request import Grammar


@pytest.mark.parametrize(
    ("pattern", "fine", "refused"),
    [
        (r"\d+", "09", "\u0663"),
        (r"[a\d]+", "a7", "\uff11"),
        (r"\w+", "a_9Z", "\u00e9"),
        (r"[^\D]", "5", "\u0664"),
        (r"[^\W]", "x", "\u00f6"),
        (r"\D\W", "\u0663\u00e9", "1a"),
        (r"\\d\s", "\\d\u00a0", "\\1 "),
    ],
)
@pytest.mark.parametrize("schema", [False, True])
def test_they_are_ascii_as_in_ecma(pattern: str, fine: str, refused: str, schema: bool) -> None:
    """Whether the grammar is the expression, or a schema's pattern."""
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(BYTE_OF_CHAR)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    grammar = Grammar.regex(pattern)
    if schema:
        grammar = Grammar.json_schema(json.dumps({"type": "string", "pattern": f"^({pattern})$"}))
    made = Grammars(tokenizer.to_str(), 257, (256,)).compile(grammar)

    def accepted(text: str) -> bool:
        matcher = made.matcher(ignore_eos=False)
        for token in tokenizer.encode(json.dumps(text, ensure_ascii=False) if schema else text).ids:
            mask = matcher.mask()
            if mask is None or not mask[token // 32] >> token % 32 & 1:
                return False
            matcher.feed(token)
        return True

    assert accepted(fine)
    assert not accepted(refused)
