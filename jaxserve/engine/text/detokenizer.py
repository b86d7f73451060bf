"""Text to token ids, and token ids to text incrementally, as they are generated.

A detokeniser only returns text that no later token can change: it never splits a UTF-8 character,
whose bytes may come in several tokens. Special tokens yield no text, unless they are asked for.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders

from jaxserve.checkpoint_files import find_gguf, read_text
from jaxserve.checkpoints import tokenizer_files
from jaxserve.config import ConfigError
from jaxserve.engine.text.text_limit import BYTE_OF_CHAR, text_limit
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.gguf.tokenizer import tokenizer_json
from jaxserve.sched.request import ContextLengthExceeded, InvalidRequest, too_many_tokens

log = logging.getLogger(__name__)

FILE_NAME = tokenizer_files.TOKENIZER
_CHARACTER = 4  # most bytes, and so most tokens, of a character
_PROMPT_TAIL = 2 * _CHARACTER  # tokens of the prompt that are used
_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
# What breaks the library at this breaks it at most texts. The runs are for patterns that try every
# way to cut them.
_PROBE = " A b, 1.5\t\n  \u00e9e\u0301 \u00df \u043f \u6c34 \ufb01 \U0001f98a" + "".join(
    40 * each for each in "a1 .\n"
)


class Detokenizer(Protocol):
    """The text of one continuation. Its deltas add up to the text that decoding prompt and output
    at once appends to the prompt's text."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; often "", while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The rest of the text. Incomplete characters become U+FFFD, as in decoding at once."""
        ...


class Tokenizer(Protocol):
    """Encodes and decodes text for one model. Thread-safe."""

    def encode(self, text: str, most: int | None = None, *, special: bool = True) -> list[int]:
        """Encodes a text. Does not hold the interpreter.

        Args:
            text: the text to encode.
            most: most tokens that are accepted; None for no limit. Texts that are certainly too
            long are not even encoded.
            special: whether to add the special tokens that the model expects (such as a first one).
            False if the text already has them.

        Raises:
            InvalidRequest: the text has too many tokens (field `prompt`), or this model takes no
                text (field `text`).
        """
        ...

    def max_bytes(self, tokens: int) -> int | None:
        """UTF-8 bytes of the longest text with at most this many tokens; None for no limit."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, all at once, without special tokens."""
        ...

    def piece(self, token_id: int) -> bytes:
        """A single token, for display. Special tokens give their names."""
        ...

    def detokenizer(self, prompt: Sequence[int] = (), shown: Sequence[int] = ()) -> Detokenizer:
        """A detokeniser for one continuation of the prompt. shown: special tokens whose names are
        part of its text."""
        ...

    def definition(self) -> str | None:
        """The content of its tokenizer.json; None if there is none."""
        ...


class HFTokenizer:
    """A Hugging Face tokenizer.json; methods as in `Tokenizer`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        # Some files have these settings left over from training: prompts would be cut or padded
        # silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._bytes: list[bytes | None] | None = None
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._bytes = [None] * tokenizer.get_vocab_size(with_added_tokens=True)
        spec = json.loads(tokenizer.to_str())
        self._limit = text_limit(spec)
        self._byte_fallback = _has_byte_fallback(spec["decoder"])

    def encode(self, text: str, most: int | None = None, *, special: bool = True) -> list[int]:
        """See `Tokenizer`. Never truncates or pads, whatever the file says."""
        if most is not None and self._limit is not None:
            problem = self._limit.exceeded(text, most)
            if problem is not None:
                raise ContextLengthExceeded("prompt", problem)
        try:
            # `encode` holds the interpreter lock until it is done, this method does not.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except BaseException as error:
            text.encode()  # half a surrogate pair is not text: UnicodeEncodeError
            problem = f"the model's tokenizer fails on this text: {_said(error)}"
            raise InvalidRequest("prompt", problem) from None
        if most is not None and len(encoding) > most:
            raise too_many_tokens(len(encoding), most)
        ids: list[int] = encoding.ids
        return ids

    def max_bytes(self, tokens: int) -> int | None:
        """See `Tokenizer`. By the longest token, if every byte of a text is in some token."""
        return None if self._limit is None else self._limit.max_bytes(tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Tokenizer`. Bytes that are not a character become U+FFFD."""
        return self._decode(token_ids)

    def piece(self, token_id: int) -> bytes:
        """See `Tokenizer`. Its bytes as they follow other text, with the space before it."""
        if self._bytes is not None and (known := self.token_bytes(token_id)):
            return known
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_fallback and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        # Decoders like SentencePiece's drop the space before the first token.
        once, twice = (self._decode([token_id] * n, special=True) for n in (1, 2))
        return (twice[len(once) :] if twice.startswith(once) else once).encode()

    def detokenizer(self, prompt: Sequence[int] = (), shown: Sequence[int] = ()) -> Detokenizer:
        """See `Tokenizer`. Works on bytes if the vocabulary is byte-level, else decodes a window of
        tokens again."""
        tail = prompt[-_PROMPT_TAIL:]
        made = _WindowDetokenizer(self, tail) if self._bytes is None else _Utf8(self, tail)
        return (
            _Showing(made, {token: self.piece(token).decode() for token in shown})
            if shown
            else made
        )

    def definition(self) -> str | None:
        """See `Tokenizer`. Without truncation and padding."""
        text: str = self._tokenizer.to_str()
        return text

    def is_silent(self, token_id: int) -> bool:
        """Whether it yields no text: it is special, or not in the vocabulary (the model's may be
        padded)."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def is_unfinished(self, token_ids: Iterable[int]) -> bool:
        """Whether tokens that decode to U+FFFD may be the beginning of a character."""
        if not self._byte_fallback:
            return True
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self.piece, token_ids)))
        return bool(decoder.getstate()[0])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary."""
        assert self._bytes is not None
        if not 0 <= token_id < len(self._bytes):
            return self._look_up(token_id)
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        try:
            text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        except BaseException as error:
            raise RuntimeError(f"the model's tokenizer fails on tokens: {_said(error)}") from None
        return text

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        if all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        return token.encode()  # an added token, stored as text


class NullTokenizer:
    """For a model without one, such as random weights: token ids in, token ids out, no text."""

    def encode(self, text: str, most: int | None = None, *, special: bool = True) -> list[int]:
        """Raises InvalidRequest."""
        raise InvalidRequest("text", "this model has no tokenizer; send token ids instead")

    def max_bytes(self, tokens: int) -> int | None:
        """0: it accepts no text."""
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """No text, whatever the ids."""
        return ""

    def piece(self, token_id: int) -> bytes:
        """Nothing."""
        return b""

    def detokenizer(self, prompt: Sequence[int] = (), shown: Sequence[int] = ()) -> Detokenizer:
        """A detokeniser whose deltas are all empty."""
        return _Silent()

    def definition(self) -> None:
        """None."""
        return None


def load_tokenizer(
    path: str | Path | None, vocab_size: int | None = None, *, needed: bool = True
) -> Tokenizer:
    """The tokenizer of a checkpoint directory (its tokenizer.json), of such a file itself, or of a
    GGUF file; a NullTokenizer for None or "".

    Args:
        path: the directory or file.
        vocab_size: the model's; None for any.
        needed: whether it must be there. Random weights generate noise without one, too.

    Raises:
        ConfigError: if the file is missing or unreadable, or is another model's: its ids go beyond
            vocab_size.
    """
    if not path:
        return NullTokenizer()
    gguf = find_gguf(path)
    file = gguf or Path(path).expanduser()
    if file.is_dir():
        file = file / FILE_NAME
    if not needed and not file.is_file():
        return NullTokenizer()
    if not os.path.lexists(file):
        raise ConfigError(
            f"model.path: there is no {file}; a checkpoint needs its tokenizer in that form "
            "(transformers writes it: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    try:
        if gguf is not None:
            found = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(read_header(gguf))))
        else:
            text = read_text(file, tokenizer_files.MAX_TOKENIZER)
            found = _with_added(tokenizers.Tokenizer.from_str(text), file)
        made = HFTokenizer(found)
        _probe(found)
    except (GGUFError, ConfigError) as error:
        raise ConfigError(f"model.path: {error}") from None
    except BaseException as error:
        problem = f"cannot read the tokenizer {file}: {_said(error)}"
        raise ConfigError(f"model.path: {problem}") from error
    if vocab_size is not None:
        _check_ids(file, found, vocab_size)
    return made


def _check_ids(file: Path, found: tokenizers.Tokenizer, vocab_size: int) -> None:
    """Tokens that were added to a vocabulary, for padding, say, may have no embedding; who sends
    one is told."""
    everything, more = found.get_vocab(with_added_tokens=True), found.get_added_tokens_decoder()
    for added in (False, True):
        ids = {token: i for token, i in everything.items() if (i in more) == added}
        token = max(ids, key=ids.__getitem__, default="")
        if ids.get(token, -1) < vocab_size:
            continue
        problem = f"{file} has an id {ids[token]} ({token!r}), but config.json: vocab_size is"
        if not added:
            raise ConfigError(f"model.path: {problem} {vocab_size}")
        log.warning("prompts with that token will be refused: %s %d", problem, vocab_size)


def _with_added(found: tokenizers.Tokenizer, file: Path) -> tokenizers.Tokenizer:
    """The tokenizer with what only the files beside its own say of special and added tokens.
    Raises ValueError, and ConfigError where they contradict each other."""
    folder = file.parent
    there = found.get_added_tokens_decoder()
    known = {token.content: (token.special, _flags(token)) for token in there.values()}
    missing = []
    for token in tokenizer_files.added_tokens(folder, tokenizer_files.read_config(folder)):
        own = found.token_to_id(token.content)
        if own is None and token.id is None:
            continue  # a name for a token that the model does not have
        if token.id is None:
            if token.content not in known:
                missing.append(token._replace(id=own))
            continue
        taken = found.id_to_token(token.id)
        if own not in (None, token.id) or taken not in (None, token.content):
            log.warning("%s: by the files beside it token %d is %.80r, which it has as %s; its own "
                        "%.80r counts", file, token.id, token.content, own, taken)  # fmt: skip
        elif known.get(token.content) != (token.special, token.flags):
            missing.append(token)
    if not missing:
        return found
    spec = json.loads(found.to_str())
    added = {each["content"]: each for each in spec["added_tokens"]}
    for token in missing:
        more = {"id": token.id, "content": token.content, "special": token.special}
        added[token.content] = {**more, **token.flags}
    ids = {content: each["id"] for content, each in added.items()}
    if isinstance(spec["model"]["vocab"], dict):  # or they would get the next ids that are free
        spec["model"]["vocab"] = ids | spec["model"]["vocab"]
    spec["added_tokens"] = sorted(added.values(), key=lambda each: each["id"])
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    for content, i in ids.items():
        if (got := made.token_to_id(content)) != i:
            what = f"{content!r:.80} is token {i} by the files beside it"
            raise ConfigError(f"{file}: {what}, which leaves a gap: it would be {got}")
    return made


def _probe(found: tokenizers.Tokenizer) -> None:
    try:
        found.decode(found.encode(_PROBE).ids)
    except Exception as error:  # some know no such characters, and say so
        log.debug("the tokenizer does not encode everything: %s", error)


def _flags(token: tokenizers.AddedToken) -> dict[str, bool]:
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return {name: getattr(token, name) for name in names}


def _has_byte_fallback(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteFallback" or any(
        map(_has_byte_fallback, decoder.get("decoders") or ())
    )


def _said(error: BaseException) -> str:
    """What the library says is wrong, in a line: it raises bare Exceptions, and panics, which are
    none. Anything else that is no Exception is raised again."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class _Silent:
    def feed(self, token_ids: Iterable[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Utf8:
    """For byte-level vocabularies (GPT-2, OPT, Llama 3, Qwen): every token is a string of bytes,
    and text is the bytes decoded. Well under a microsecond a token, nothing is decoded twice."""

    def __init__(self, tokenizer: HFTokenizer, prompt_tail: Sequence[int]) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.feed(prompt_tail)

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Showing:
    """Another one, with texts of its own for some tokens, which are the end of any character that
    comes before them."""

    def __init__(self, inner: Detokenizer, texts: Mapping[int, str]) -> None:
        self._inner, self._texts = inner, texts

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._one, token_ids))

    def flush(self) -> str:
        return self._inner.flush()

    def _one(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return self._inner.feed((token_id,)) if text is None else self._inner.flush() + text


class _WindowDetokenizer:
    """For every other decoder: decodes a window of the last tokens, with and without the new ones,
    and says the difference.

    The settled part of the window is there for context: decoders in the manner of SentencePiece
    drop the space before the first token they see, and only that one's.
    """

    def __init__(self, tokenizer: HFTokenizer, prompt_tail: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        self._is_silent, self._is_unfinished = tokenizer.is_silent, tokenizer.is_unfinished
        self._settled: list[int] = []
        self._settled_text = ""
        self._pending: list[int] = []
        self.feed(self._from_whole_character(prompt_tail))

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._one, token_ids))

    def flush(self) -> str:
        return self._settle(self._decode([*self._settled, *self._pending]))

    def _one(self, token_id: int) -> str:
        # In the window such a token would be all the context the next one has: none.
        if self._is_silent(token_id):
            return ""
        self._pending.append(token_id)
        text = self._decode([*self._settled, *self._pending])
        waits = text.endswith(_REPLACEMENT) and len(self._pending) < _CHARACTER
        if waits and self._is_unfinished(self._pending):
            return ""
        return self._settle(text)

    def _from_whole_character(self, tail: Sequence[int]) -> Sequence[int]:
        """The tail from the first character on that is not cut: with half of one before them, the
        decoder takes the bytes that follow for invalid, too."""
        heard = [token for token in tail if not self._is_silent(token)]
        for start in range(min(_CHARACTER, len(heard))):
            for end in range(start + 1, start + 1 + _CHARACTER):
                text = self._decode(heard[start:end])
                if text and _REPLACEMENT not in text:
                    return heard[start:]
        return ()

    def _settle(self, text: str) -> str:
        delta = text[len(self._settled_text) :]
        if self._pending:
            self._settled, self._pending = self._pending, []
            self._settled_text = self._decode(self._settled)
        return delta
