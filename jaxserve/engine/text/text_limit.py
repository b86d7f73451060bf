"""Limits of texts whose tokens may fit, judged by their bytes alone, without encoding them.

A token stands for a limited number of bytes if every byte of a text ends up in some token. If a
tokenizer drops text, or writes any length of it as one token (unknown words, stripped blanks), no
limit is assumed.

The longest tokens are runs of blanks or of one sign, with 128 bytes where a word has six. So texts
are also counted by kind: letters, digits, signs, and beginnings of words. No token has more of a
kind than the token with the most. Some tokenizers surely keep nothing else than words: if blanks
separate words, each word is at least one token.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

_SHRINKING = {
    None: 1,
    "Prepend": 1,
    "ByteLevel": 1,
    # Bytes of UTF-8 that may become one: K (U+212A) has 3 bytes, and ASCII's K 1; then up to three
    # times fewer if marks join their letter, such as U+03B9 U+0308 U+0301.
    "NFD": 3,
    "NFC": 9,
}
_COMPOSING = ("NFC", "NFKC")  # marks join the ASCII before them
_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")
_OF_WORDS = (None, *_FORMS, "Prepend", "Lowercase", "StripAccents", "Strip", "BertNormalizer")
_KEEPING = (None, "ByteLevel", "Metaspace", "Digits")  # pre-tokenizers that drop nothing
_PARTING = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")  # at blanks

LETTER, DIGIT, SIGN, IDEOGRAPH, WORD = range(5)
"""Kinds of bytes, and the beginnings of words: the bytes after a blank."""
_KINDS = 5
_OTHER, _BLANK, _MARK = 5, 6, 7  # _MARK: the first byte of U+2581, which may stand for a blank
_KIND = np.full(256, _OTHER, np.uint8)  # by byte of UTF-8
for _byte in range(0x21, 0x7F):
    _KIND[_byte] = SIGN
for _byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz":
    _KIND[_byte] = LETTER
_KIND[list(b"0123456789")] = DIGIT
_KIND[0xE4:0xEA] = IDEOGRAPH  # the first byte of U+4000 to U+9FFF, which no normalizer changes
_KIND[list(b"\t\n\r ")] = _BLANK
_KIND[0xE2] = _MARK
_CONTINUES = np.zeros(256, bool)
_CONTINUES[0x80:0xC0] = True
_PIECE = 1 << 16  # characters that are counted at once
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TextLimit:
    """Limits text by bytes.

    Attributes:
        bytes_per_token: most UTF-8 bytes of a token; None for no limit.
        swallowing: special tokens that swallow any number of blanks beside them. Texts with one of
        them have no limit of bytes.
        most: most of each kind in a token; 0 if unknown.
        composes: whether other characters may join the ASCII before them.
        ascii_words: whether only words that begin with ASCII are surely kept.
    """

    bytes_per_token: int | None
    swallowing: tuple[str, ...] = ()
    most: tuple[int, ...] = field(default=(0,) * _KINDS, compare=False)
    composes: bool = field(default=False, compare=False)
    ascii_words: bool = field(default=False, compare=False)

    def max_bytes(self, tokens: int) -> int | None:
        """UTF-8 bytes of the longest text with at most this many tokens; None for no limit."""
        if self.swallowing or self.bytes_per_token is None:
            return None
        return self.bytes_per_token * tokens

    def exceeded(self, text: str, tokens: int) -> str | None:
        """The problem of a text that certainly has more than `tokens` tokens; None if it may fit.
        Takes a few nanoseconds per byte, and stops as soon as a text is known to be too long."""
        return self._too_many_bytes(text, tokens) or self._too_many_of_a_kind(text, tokens)

    def _too_many_bytes(self, text: str, tokens: int) -> str | None:
        if self.bytes_per_token is None:
            return None
        most = self.bytes_per_token * tokens
        if 4 * len(text) <= most:  # at most 4 bytes per character
            return None
        size = len(text) if len(text) > most else sum(map(len, _pieces(text)))
        if size <= most or any(token in text for token in self.swallowing):
            return None
        what = "characters" if size == len(text) else "bytes"
        tokens_of = f"{tokens} tokens of at most {self.bytes_per_token} bytes"
        return f"has {size} {what} of text; at most {most} bytes can be served ({tokens_of})"

    def _too_many_of_a_kind(self, text: str, tokens: int) -> str | None:
        if len(text) <= tokens or not any(self.most):  # no kind can occur more often
            return None
        known = [kind for kind in range(_KINDS) if self.most[kind]]
        found = np.zeros(_KINDS, np.int64)
        for piece in _pieces(text):
            found += self._count(piece)
            if any(found[kind] > self.most[kind] * tokens for kind in known):
                size = f"{len(text)} characters of text"
                return f"has more than {tokens} tokens in {size}; at most {tokens} can be served"
        return None

    def _count(self, piece: bytes) -> np.ndarray:
        """How much of each kind surely remains after the normalizer."""
        raw = np.frombuffer(piece, np.uint8)
        kinds = _KIND[raw]
        begins = (kinds[:-1] == _BLANK) & (kinds[1:] <= _OTHER) & ~_CONTINUES[raw[1:]]
        if self.composes:  # it depends on what follows the piece
            kept = np.append(raw[1:] < 0x80, False) | (raw >= 0x80)
            kinds = np.where(kept, kinds, _OTHER)
        if self.ascii_words:
            begins &= (kinds[1:] == LETTER) | (kinds[1:] == DIGIT)
        found = np.bincount(kinds, minlength=_KINDS)[:_KINDS]
        found[WORD] = np.count_nonzero(begins)
        return found


def _pieces(text: str) -> Iterator[bytes]:
    """UTF-8 of the text in pieces, so that other threads get the interpreter in between."""
    for begin in range(0, len(text), _PIECE):
        yield text[begin : begin + _PIECE].encode("utf-8", "surrogatepass")


def _most(tokens: Iterable[bytes]) -> list[int]:
    """The most of each kind in one of the tokens. A word may begin at its first byte."""
    most = np.zeros(_KINDS, np.int64)
    for token in tokens:
        kinds = _KIND[np.frombuffer(b" " + token, np.uint8)]
        found = np.bincount(kinds, minlength=_KINDS)[:_KINDS]
        found[WORD] = np.count_nonzero((kinds[:-1] == _BLANK) & (kinds[1:] != _BLANK))
        np.maximum(most, found, out=most)
    return most.tolist()


def text_limit(spec: Mapping[str, Any]) -> TextLimit | None:
    """The limit of a parsed tokenizer.json; None if there is none."""
    model, added = spec["model"], spec.get("added_tokens") or ()
    normalizers = list(_parts(spec.get("normalizer"), "normalizers"))
    pre_tokenizers = list(_parts(spec.get("pre_tokenizer"), "pretokenizers"))
    swallowing = tuple(t["content"] for t in added if t.get("lstrip") or t.get("rstrip"))
    if model.get("type") != "BPE":
        kept = all(map(_keeps_words, normalizers)) and any(map(_parts_words, pre_tokenizers))
        if not kept or not all(_parts_words(each) or _keeps(each) for each in pre_tokenizers):
            return None
        words = max(1, _most(_contents(added))[WORD])
        return TextLimit(None, swallowing, (0, 0, 0, 0, words), composes=True, ascii_words=True)
    shrinking = _shrinking(spec.get("normalizer"))
    if shrinking is None or not _keeps(spec.get("pre_tokenizer")):
        return None
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
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
    if swallowing and shrinking > 1:
        return None  # they may occur only in the normalised text
    longest = max([longest, *(len(token["content"].encode()) for token in added)])
    texts = (_written(token, byte_level=byte_level) for token in model["vocab"])
    most = _most([*texts, *_contents(added)])
    for part in normalizers:
        for kind in _replaced(part):
            most[kind] = 0
    composes = any(part["type"] in _COMPOSING for part in normalizers)
    return TextLimit(shrinking * longest, swallowing, tuple(most), composes)


def _contents(added: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    """Texts of added tokens, as they are and normalised."""
    for token in added:
        yield token["content"].encode()
        for form in _FORMS:
            yield unicodedata.normalize(form, token["content"]).encode()


def _parts(of: Mapping[str, Any] | None, several: str) -> Iterator[Mapping[str, Any]]:
    """The component itself, or the parts of a sequence."""
    if of is not None and of["type"] == "Sequence":
        for each in of[several]:
            yield from _parts(each, several)
    elif of is not None:
        yield of


def _keeps_words(normalizer: Mapping[str, Any]) -> bool:
    """Whether a letter or digit after a blank, both in ASCII, remains one."""
    return normalizer["type"] in _OF_WORDS


def _parts_words(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether each word is at least one token."""
    kind = pre_tokenizer["type"]
    return kind in _PARTING or (kind == "Metaspace" and pre_tokenizer.get("split") is not False)


def _replaced(normalizer: Mapping[str, Any]) -> Iterator[int]:
    """Kinds that a normalizer may reduce. Blanks may become U+2581."""
    if normalizer["type"] != "Replace":
        return
    found, put = normalizer["pattern"]["String"], normalizer["content"]
    if (found, put) != (" ", "\u2581"):
        yield from (kind for kind in set(_KIND[list(found.encode())].tolist()) if kind < _KINDS)
        yield WORD


def _written(token: str, *, byte_level: bool) -> bytes:
    """The text that a token of the vocabulary stands for."""
    if byte_level:
        if all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        return token.encode()
    if (byte := _BYTE.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


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


def _byte_of_char() -> dict[str, int]:
    """How byte-level vocabularies write bytes (Radford et al. 2019, GPT-2): printable Latin-1 as
    itself, the others, in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table


BYTE_OF_CHAR = _byte_of_char()
