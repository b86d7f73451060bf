"""How long a text can be whose tokens still fit, by its bytes alone, without encoding it.

A token stands for a limited number of bytes if every byte of a text ends up in some token. Where a
tokenizer drops text, or writes any length of it as one token (unknown words, stripped blanks), no
limit is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SHRINKING = {
    None: 1,
    "Prepend": 1,
    "ByteLevel": 1,
    # Bytes of UTF-8 that become one: K (U+212A) is 3 bytes, and K of ASCII 1; then up to three
    # times fewer where marks join their letter, such as U+03B9 U+0308 U+0301.
    "NFD": 3,
    "NFC": 9,
}
_KEEPING = (None, "ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop nothing


@dataclass(frozen=True)
class TextLimit:
    """Limits text by bytes.

    Attributes:
        bytes_per_token: UTF-8 bytes that a token stands for at most.
        swallowing: special tokens that swallow any number of blanks beside them. A text with one of
            them has no limit.
    """

    bytes_per_token: int
    swallowing: tuple[str, ...] = ()

    def max_bytes(self, tokens: int) -> int | None:
        """UTF-8 bytes of the longest text that may make so many tokens; None for no limit."""
        return None if self.swallowing else self.bytes_per_token * tokens

    def exceeded(self, text: str, tokens: int) -> str | None:
        """What is wrong with a text that certainly makes more than `tokens` tokens; None if it may
        fit. Fast unless the text is nearly too long, or longer."""
        most = self.bytes_per_token * tokens
        if 4 * len(text) <= most:  # at most 4 bytes a character
            return None
        size = len(text) if len(text) > most else len(text.encode())
        if size <= most or any(token in text for token in self.swallowing):
            return None
        what = "characters" if size == len(text) else "bytes"
        tokens_of = f"{tokens} tokens of at most {self.bytes_per_token} bytes"
        return f"has {size} {what} of text; at most {most} bytes can be served ({tokens_of})"


def text_limit(spec: Mapping[str, Any]) -> TextLimit | None:
    """The limit of a parsed tokenizer.json; None if there is none."""
    model, added = spec["model"], spec.get("added_tokens") or ()
    shrinking = _shrinking(spec.get("normalizer"))
    if shrinking is None or not _keeps(spec.get("pre_tokenizer")) or model.get("type") != "BPE":
        return None
    byte_level = _has(spec, "pre_tokenizer", "ByteLevel") or _has(spec, "normalizer", "ByteLevel")
    if byte_level:
        # Each character of such a token is a byte.
        longest = max(map(len, model["vocab"]), default=0)
        complete = all(char in model["vocab"] for char in BYTE_OF_CHAR)
    else:
        longest = max((len(token.encode()) for token in model["vocab"]), default=0)
        complete = model.get("byte_fallback") and all(
            f"<0x{byte:02X}>" in model["vocab"] for byte in range(256)
        )
    if not complete:
        return None
    swallowing = tuple(t["content"] for t in added if t.get("lstrip") or t.get("rstrip"))
    if swallowing and shrinking > 1:
        return None  # they may be found in the normalised text only
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    return TextLimit(shrinking * longest, swallowing)


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many bytes the normalizer may turn into one; None for any number."""
    kind = None if normalizer is None else normalizer["type"]
    if normalizer is not None and kind == "Sequence":
        product = 1
        for each in normalizer["normalizers"]:
            factor = _shrinking(each)
            if factor is None:
                return None
            product *= factor
        return product
    if normalizer is not None and kind == "Replace":
        found = normalizer["pattern"].get("String")
        if not found or not normalizer["content"]:
            return None
        return max(1, -(-len(found.encode()) // len(normalizer["content"].encode())))
    return _SHRINKING.get(kind)


def _keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(map(_keeps, pre_tokenizer["pretokenizers"]))
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") != "Removed"
    return pre_tokenizer["type"] in _KEEPING


def _has(spec: Mapping[str, Any], part: str, kind: str) -> bool:
    found = spec.get(part)
    if found is None:
        return False
    inner = found.get("pretokenizers") or found.get("normalizers") or [found]
    return any(each["type"] == kind for each in inner)


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies write bytes (Radford et al. 2019, GPT-2): printable Latin-1 as
    itself, the others, in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table


BYTE_OF_CHAR = _byte_of_char()
