"""The tokenizer and the chat template of a GGUF file, in the form of Hugging Face's tokenizer.json
and tokenizer_config.json.

llama.cpp only stores a name for how text is split before pairs are merged (`tokenizer.ggml.pre`),
and does not store the merges of a SentencePiece vocabulary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxserve.gguf.header import Header

log = logging.getLogger(__name__)

TEMPLATE = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_MAX_LENGTH = 1024  # characters of a token made by merges
_MAX_MERGES = 64 << 20  # characters of all merges
_SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_ENDS = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id",
         "fim_sep_token_id")  # fmt: skip
_TYPES = "tokenizer.ggml.token_type"
# llama.cpp ends an answer at these whatever the file says: many files name only one end token, or
# mark it as text.
_END_TEXTS = frozenset(
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
     "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
     "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "</s>",
     "<｜end▁of▁sentence｜>", "[e~[",
     # Separators of source files, or padding.
     "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
     "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>")
)  # fmt: skip
# In formats with both of these, `<|end|>` ends a part of an answer.
_PARTS, _PART_END = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"}), "<|end|>"
_PADDING = re.compile(r"\[PAD\d+\]")

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_LLAMA_3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN_2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_REST}"
# DeepSeek's, each splitting what the ones before have left. The letters are those of scripts with
# two cases at the time when the vocabulary was made.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-"
    "ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM = (
    r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+"
)  # fmt: skip
_DEEPSEEK_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_REST}",
)


class _Cut(NamedTuple):
    """How text is split.

    Attributes:
        digits: digits are split one by one, before all else.
        regexes: split by these instead of GPT-2's regex, one after the other.
        add_bos: a prompt begins with BOS unless the file says otherwise.
        ignore_merges: text that is a token as a whole is not merged.
        nfc: text is NFC-normalised first.
    """

    digits: bool = False
    regexes: tuple[str, ...] = ()
    add_bos: bool = False
    ignore_merges: bool = False
    nfc: bool = False


_BY_CUT = {
    _Cut(): ("gpt-2", "phi-2", "mpt", "olmo", "exaone4"),
    _Cut(digits=True): ("smollm", "starcoder", "command-r", "refact", "minerva-7b"),
    _Cut(regexes=(_LLAMA_3,), add_bos=True, ignore_merges=True): (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"
    ),
    _Cut(regexes=(_LLAMA_3,)): ("dbrx", "smaug-bpe"),
    _Cut(regexes=(_QWEN_2,), nfc=True): ("qwen2", "deepseek-r1-qwen", "megrez"),
    _Cut(regexes=(_TEKKEN,), add_bos=True, ignore_merges=True): ("tekken",),
    _Cut(regexes=(_GPT_4O,)): ("gpt-4o", "llama4"),
    _Cut(regexes=(_SEED_CODER,)): ("seed-coder",),
    _Cut(regexes=_DEEPSEEK_LLM): ("deepseek-llm",),
    _Cut(regexes=_DEEPSEEK_CODER): ("deepseek-coder",),
    _Cut(regexes=_DEEPSEEK_V3): ("deepseek-v3",),
}  # fmt: skip
CUTS = {name: cut for cut, names in _BY_CUT.items() for name in names}
"""Splits by `tokenizer.ggml.pre`."""
_OF_OLD_FILES = {"qwen2": "qwen2", "qwen3": "qwen2"}  # splits by architecture


def tokenizer_json(header: Header) -> dict[str, Any]:
    """The tokenizer.json of the same model.

    Raises:
        GGUFError: If there is no tokenizer, or it is not supported.
    """
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(header)
    if kind == "llama":
        return _sentencepiece(header)
    if kind is None:
        raise header.error("it has no tokenizer (tokenizer.ggml.model)")
    raise header.error(
        f"tokenizer.ggml.model is {kind!r:.80}, which is not supported (known: gpt2, llama)"
    )


def tokenizer_config_json(header: Header) -> dict[str, Any]:
    """The special tokens and the chat template of tokenizer_config.json."""
    tokens, types = _tokens(header), _types(header)
    config = {
        name.removesuffix("_id"): tokens[i]
        for name, i in special_ids(header).items()
        if types[i] in (_UNKNOWN, _CONTROL)
    }
    named = {}
    for key, template in header.metadata.items():
        if key == TEMPLATE or key.startswith(f"{TEMPLATE}."):
            if not isinstance(template, str):
                raise header.error(f"{key} is not text")
            named[key[len(TEMPLATE) + 1 :] or "default"] = template
    if not named:
        return config
    if set(named) == {"default"}:
        return {**config, "chat_template": named["default"]}
    several = [{"name": name, "template": template} for name, template in named.items()]
    return {**config, "chat_template": several}


def special_ids(header: Header) -> dict[str, int]:
    """The ids of bos_token_id, eos_token_id and so on that the file gives."""
    values = {name: header.metadata.get(key) for name, key in _SPECIAL.items()}
    if header.metadata.get("tokenizer.ggml.model") == "llama":  # old files omit these
        tokens = _tokens(header)
        for name, i, text in (("bos_token_id", 1, "<s>"), ("eos_token_id", 2, "</s>")):
            if values[name] is None and tokens[i : i + 1] == [text]:
                values[name] = i
    return {name: _id(header, _SPECIAL[name], i) for name, i in values.items() if i is not None}


def end_ids(header: Header) -> tuple[int, ...]:
    """The tokens that end an answer, the end of a text first."""
    keys = [f"tokenizer.ggml.{name}" for name in _ENDS]
    named = [_id(header, key, header.metadata[key]) for key in keys if key in header.metadata]
    if (end := special_ids(header).get("eos_token_id")) is not None:
        named.insert(0, end)
    return tuple(dict.fromkeys([*named, *_text_ends(header)]))


def _text_ends(header: Header) -> list[int]:
    """The tokens that end an answer, recognised by their texts."""
    ends = {i: text for i, text in enumerate(_tokens(header)) if text in _END_TEXTS}
    texts = set(ends.values())
    parts = any(part <= texts for part in _PARTS)
    stated = _numbers(header, _TYPES, _CONTROL)
    return [
        i
        for i, text in ends.items()
        if not (text == _PART_END and parts)
        # In other vocabularies this is an HTML tag.
        and not (text == "</s>" and stated[i] != _CONTROL)
    ]


def _id(header: Header, key: str, value: Any) -> int:
    tokens = len(_tokens(header))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < tokens:
        raise header.error(f"{key} is {value!r:.80}, which is none of its {tokens} tokens")
    return value


def _tokens(header: Header) -> list[str]:
    return _strings(header, "tokenizer.ggml.tokens")


def _strings(header: Header, key: str) -> list[str]:
    strings = header.metadata.get(key, [])
    if not isinstance(strings, list):
        raise header.error(f"{key} is not a list of texts")
    return strings


def _types(header: Header) -> np.ndarray:
    """int [V]: the type of each token. Without types in the file, all are normal except the
    beginning of a text and the ends of answers."""
    types, named = _numbers(header, _TYPES, _NORMAL).copy(), special_ids(header)
    types[_text_ends(header)] = _CONTROL
    types[[named[name] for name in ("bos_token_id", "eos_token_id") if name in named]] = _CONTROL
    return types


def _numbers(header: Header, key: str, default: int) -> np.ndarray:
    tokens = len(_tokens(header))
    numbers = header.metadata.get(key)
    if numbers is None:
        return np.full(tokens, default)
    if not isinstance(numbers, np.ndarray) or len(numbers) != tokens:
        raise header.error(f"{key} does not have a number for each of its {tokens} tokens")
    return numbers


def _vocabulary(header: Header) -> dict[str, int]:
    """Ids by token, without the placeholders that converters make for unused rows."""
    vocabulary: dict[str, int] = {}
    types, twice = _types(header), 0
    for i, token in enumerate(_tokens(header)):
        if types[i] == _UNUSED and _PADDING.fullmatch(token):
            continue
        if vocabulary.setdefault(token, i) != i:
            twice += 1
            if twice == 1:
                log.warning("%s: tokens %d and %d are both %.80r; only the first is used",
                            header.path, vocabulary[token], i, token)  # fmt: skip
    if twice > 1:
        log.warning("%s: %d tokens are there more than once", header.path, twice)
    if not vocabulary:
        raise header.error("it has no tokens (tokenizer.ggml.tokens)")
    return vocabulary


def _byte_level(header: Header) -> dict[str, Any]:
    """A tokenizer like GPT-2's: merged pairs of bytes."""
    cut = _cut(header)
    vocabulary = _vocabulary(header)
    merges = [_pair(header, merge) for merge in _strings(header, "tokenizer.ggml.merges")]
    missing = next((pair for pair in merges if "".join(pair) not in vocabulary), None)
    if missing is not None:
        raise header.error(f"tokenizer.ggml.merges: {missing!r:.80} makes no token")
    steps: list[dict[str, Any]] = []
    if cut.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    for regex in cut.regexes:
        split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}
        steps.append({**split, "invert": False})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": not cut.regexes})
    return _assembled(
        header,
        normalizer={"type": "NFC"} if cut.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": steps},
        decoder={**byte_level, "use_regex": True},
        add_bos=cut.add_bos,
        model={
            "vocab": vocabulary,
            "merges": merges,
            "ignore_merges": cut.ignore_merges,
            "byte_fallback": False,
            "fuse_unk": False,
            "unk_token": None,
        },
    )


def _cut(header: Header) -> _Cut:
    name = header.metadata.get("tokenizer.ggml.pre")
    if name in (None, "default"):  # files from before April 2024
        name = _OF_OLD_FILES.get(header.metadata.get("general.architecture", ""), name)
    if name is None:
        raise header.error("it has no tokenizer.ggml.pre, which says how text is cut; convert anew")
    if name not in CUTS:
        known = ", ".join(CUTS)
        raise header.error(
            f"tokenizer.ggml.pre is {name!r:.80}, which is not supported (known: {known})"
        )
    return CUTS[name]


def _pair(header: Header, merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0:
        raise header.error(f"tokenizer.ggml.merges: {merge!r:.80} is not a pair")
    return merge[:at], merge[at + 1 :]


def _sentencepiece(header: Header) -> dict[str, Any]:
    """A tokenizer like Llama 2's: pieces by their scores, and bytes for text outside all pieces."""
    vocabulary = _vocabulary(header)
    unknown = special_ids(header).get("unk_token_id", 0)
    prefix = header.metadata.get("tokenizer.ggml.add_space_prefix", True)
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    # Every stretch of text gets the prefix, also after special tokens, and keeps its spaces.
    normalizers: list[dict[str, Any]] = []
    if prefix:
        normalizers.append({"type": "Prepend", "prepend": "▁"})
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    return _assembled(
        header,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        add_bos=True,
        model={
            "vocab": vocabulary,
            "merges": _merges(header, vocabulary),
            "ignore_merges": False,
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": _tokens(header)[unknown],
        },
    )


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, in the order of the token's score, highest first, as
    SentencePiece merges them. Equal scores are in transformers' order: longest first part first."""
    scores, types = _numbers(header, "tokenizer.ggml.scores", 0), _types(header)
    if not np.isfinite(scores).all():
        raise header.error("tokenizer.ggml.scores has a value that is not a number")
    pairs: list[tuple[float, int, int, tuple[str, str]]] = []
    size = 0
    for i, token in enumerate(_tokens(header)):
        kept = types[i] in (_NORMAL, _USER_DEFINED) and len(token) <= _MAX_LENGTH
        if not kept or vocabulary[token] != i:
            continue
        for at in range(1, len(token)):
            if token[:at] in vocabulary and token[at:] in vocabulary:
                pairs.append((-scores[i].item(), -at, at - len(token), (token[:at], token[at:])))
                size += len(token)
        if size > _MAX_MERGES:
            raise header.error(
                f"the pairs that make its tokens have more than {_MAX_MERGES:,} characters"
            )
    return [pair for *_, pair in sorted(pairs, key=lambda merge: merge[:3])]


def _assembled(
    header: Header,
    *,
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
    model: dict[str, Any],
    add_bos: bool,
) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(header, model["vocab"])),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": _ends_of_prompts(header, add_bos),
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            **model,
        },
    }


def _added(header: Header, vocabulary: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The tokens that are recognised in a text before it is split."""
    types, tokens = _types(header), _tokens(header)
    for i in np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist():
        if vocabulary.get(tokens[i]) == i:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            special = bool(types[i] != _USER_DEFINED)
            yield {"id": i, "content": tokens[i], **flags, "special": special}


def _ends_of_prompts(header: Header, add_bos: bool) -> dict[str, Any] | None:
    ids, tokens = special_ids(header), _tokens(header)
    begin, end = (
        [ids[name]]
        if name in ids and header.metadata.get(f"tokenizer.ggml.{flag}", default)
        else []
        for name, flag, default in (
            ("bos_token_id", "add_bos_token", add_bos),
            ("eos_token_id", "add_eos_token", False),
        )
    )
    if not begin and not end:
        return None

    def sequence(name: str, kind: int) -> Sequence[dict[str, Any]]:
        def special(i: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": tokens[i], "type_id": kind}}

        text = {"Sequence": {"id": name, "type_id": kind}}
        return [*map(special, begin), text, *map(special, end)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in begin + end
        },
    }
