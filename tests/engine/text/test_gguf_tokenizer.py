"""A tokenizer out of a GGUF file is the one of the Hugging Face checkpoint that it was made of."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import HFTokenizer, load_tokenizer
from jaxserve.gguf.header import Header
from jaxserve.gguf.tokenizer import CUTS, end_ids, tokenizer_config_json, tokenizer_json
from jaxserve.server.requests.templates.chat_template import load_chat_template
from jaxserve.weights import load_config
from tests.engine.text.tokenizers_for_tests import TEXTS
from tests.models.fixtures import hf_config
from tests.models.gguf_files import metadata_of, tensors_of, write_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MORE = (
    "I'll say it's 12345 and 67,890.5; you've WON'T we'd\u00a0HTTPServer x2y3 <|im_start|>\n\n",
    "def f(x):\n    return x ** 2  # squares\r\n\r\n\t\t/* */ //path/to/file\n",
    "caf\u00e9 cafe\u0301 \u0130stanbul \u4e2d\uff11\uff12\uff13 \u0663\u0664\u0665 \u2460\u00bd",
)
_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"|\p{{N}}|{_END}",
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|{_END}",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


@functools.cache
def hf_tokenizer(pre: str) -> Tokenizer:
    """As a checkpoint of Hugging Face with these cuts has it, trained on a few lines."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[pre]]
        level = pre_tokenizers.Sequence([*splits, level])
    elif pre == "smollm":
        level = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((TEXTS + MORE) * 3, trainer)
    return tokenizer


def fields_of(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of it."""
    spec = json.loads(tokenizer.to_str())
    ids = {i: token for token, i in spec["model"]["vocab"].items()}
    tokens = [ids[i] for i in range(len(ids))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def written(folder: Path, fields: dict[str, Any]) -> Path:
    hf = {**hf_config("llama2"), "vocab_size": len(fields["tokenizer.ggml.tokens"])}
    known = {key: value for key, value in metadata_of(hf).items() if "tokenizer" not in key}
    return write_gguf(folder / "model.gguf", known | fields, tensors_of(hf))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", *_SPLITS])
def test_byte_level(pre: str, tmp_path: Path) -> None:
    expected = hf_tokenizer(pre)
    path = written(tmp_path, fields_of(expected, pre))
    found, like = load_tokenizer(path), HFTokenizer(expected)

    @given(st.one_of(st.text(max_size=60), st.sampled_from(TEXTS + MORE)))
    @example("".join(TEXTS + MORE))
    def check(text: str) -> None:
        ids = like.encode(text)
        assert found.encode(text, special=False) == ids
        assert found.decode(ids) == like.decode(ids)

    check()
    begins = [1] if CUTS[pre].add_bos else []
    assert found.encode("a")[:1] == (begins or like.encode("a")[:1])
    added = written(
        tmp_path, fields_of(expected, pre) | {"tokenizer.ggml.add_bos_token": not begins}
    )
    assert (load_tokenizer(added).encode("a")[:1] == [1]) == (not begins)


def sentencepiece() -> dict[str, Any]:
    """Fields of a small vocabulary with scores."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁t", "he", "▁the", "▁a", "in", "▁in", "er", "▁▁", "▁he", "▁["]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.,'1[]INST/H"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *letters, "<tool>"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-100.0] * len(letters) + [0.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 260), 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def by_scores(fields: dict[str, Any], text: str) -> list[str]:
    """The pieces of a text as SentencePiece finds them: in each stretch between special tokens,
    after a space, the pair that makes the best piece is merged, over and over."""
    tokens = fields["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens[259:], fields["tokenizer.ggml.scores"][259:], strict=True))
    found: list[str] = []
    for part in re.split("(<s>|</s>|<unk>|<tool>)", text):
        if not part or part in ("<s>", "</s>", "<unk>", "<tool>"):
            found += [part] * bool(part)
            continue
        pieces = [*"▁", *part.replace(" ", "▁")]
        while True:
            pairs = [a + b for a, b in itertools.pairwise(pieces)]
            best = max(
                (pair for pair in pairs if pair in scores), key=scores.__getitem__, default=""
            )
            if not best:
                break
            at = pairs.index(best)
            pieces[at : at + 2] = [best]
        for piece in pieces:
            byte = [f"<0x{byte:02X}>" for byte in piece.encode()]
            found += [piece] if piece in scores else byte
    return found


def test_sentencepiece(tmp_path: Path) -> None:
    fields = sentencepiece()
    found = load_tokenizer(written(tmp_path, fields))
    tokens = fields["tokenizer.ggml.tokens"]

    @given(st.one_of(st.text(max_size=40), st.text(" thein.", max_size=40)))
    @example("the  thin heather in the inn, 1 é 水 <s> the</s>the<tool>  the ")
    def check(text: str) -> None:
        ids = found.encode(text, special=False)
        assert [tokens[i] for i in ids] == by_scores(fields, text)
        assert found.encode(text) == [1, *ids]
        if "<" not in text:
            assert found.decode(ids) == text.replace("▁", " ")

    check()


@pytest.mark.promise(34)
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<s>[INST] Hi", ["<s>", "▁[", "I", "N", "S", "T", "]", "▁", "H", "i"]),
        ("</s> the", ["</s>", "▁", "▁the"]),
        ("   ", ["▁▁", "▁▁"]),
        ("the<tool>a", ["▁the", "<tool>", "▁a"]),
        ("in\n", ["▁in", "<0x0A>"]),
        ("", []),
    ],
)
def test_each_stretch_of_text_has_a_space_before_it(
    text: str, pieces: list[str], tmp_path: Path
) -> None:
    """As llama.cpp and Llama 2's own tokenizer.json have it, after special tokens, too."""
    fields = sentencepiece()
    found = load_tokenizer(written(tmp_path, fields))
    ids = found.encode(text, special=False)
    assert [fields["tokenizer.ggml.tokens"][i] for i in ids] == pieces


def test_without_a_space_before_it(tmp_path: Path) -> None:
    """As Gemma's."""
    fields = sentencepiece()
    never = load_tokenizer(written(tmp_path, fields | {"tokenizer.ggml.add_space_prefix": False}))
    tokens = fields["tokenizer.ggml.tokens"]
    ids = never.encode("the<s>the the", special=False)
    assert [tokens[i] for i in ids] == ["t", "he", "<s>", "t", "he", "▁the"]
    assert never.decode(never.encode(" the")) == " the"


def test_tokens_that_are_found_whole(tmp_path: Path) -> None:
    fields = fields_of(hf_tokenizer("gpt-2"), "gpt-2")
    fields["tokenizer.ggml.tokens"] += ["<tool>", "[PAD701]"]
    fields["tokenizer.ggml.token_type"] += [4, 5]
    found = load_tokenizer(written(tmp_path, fields))
    size = len(fields["tokenizer.ggml.tokens"])
    assert found.encode("<|im_end|><tool>") == [2, size - 2]
    assert found.decode([2, size - 2, size - 1]) == "<tool>"  # one is special, one no token at all
    assert len(found.encode("[PAD701]")) > 1


def with_token(*texts: str, kind: int) -> dict[str, Any]:
    fields = fields_of(hf_tokenizer("gpt-2"), "gpt-2")
    fields["tokenizer.ggml.tokens"] += texts
    fields["tokenizer.ggml.token_type"] += [kind] * len(texts)
    return fields


def ends_of(fields: dict[str, Any]) -> list[str]:
    ends = end_ids(Header(Path("m"), fields | {_TYPES: np.array(fields[_TYPES])}, {}))
    return [fields["tokenizer.ggml.tokens"][i] for i in ends]


_TYPES = "tokenizer.ggml.token_type"
END_TEXTS = (
    "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<|call|>",
    "<｜end▁of▁sentence｜>", "[e~[", "<|return|>", "<|calls|>", "<|flush|>", "<|fim_pad|>",
    "<fim_pad>", "[PAD]", "<|repo_name|>", "<reponame>", "<|file_sep|>",
)  # fmt: skip


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user defined"])
def test_ends_by_their_texts(kind: int, tmp_path: Path) -> None:
    """Whatever the file calls them, they end an answer, are found whole, and are no text."""
    assert all(ends_of(with_token(text, kind=kind))[2:] == [text] for text in END_TEXTS)
    some = END_TEXTS[:10]
    fields = with_token(*some, kind=kind)
    assert ends_of(fields) == ["<|im_end|>", "<|endoftext|>", *some]
    path, size = written(tmp_path, fields), len(fields["tokenizer.ggml.tokens"])
    assert [*load_config(path)[1].eos_token_ids[2:]] == [*range(size - len(some), size)]
    found = load_tokenizer(path)
    ids = found.encode(f"a{'b'.join(some)}b", special=False)
    assert len(ids) == 2 * len(some) + 1
    assert found.decode(ids) == "a" + "b" * len(some)


def test_what_ends_only_a_part_of_an_answer() -> None:
    harmony = with_token("<|return|>", "<|call|>", "<|end|>", kind=3)
    assert "<|end|>" not in ends_of(harmony) and "<|call|>" in ends_of(harmony)
    assert "</s>" not in ends_of(with_token("</s>", kind=4))  # a tag of HTML, as Gemma has it
    assert "</s>" in ends_of(with_token("</s>", kind=3))


def test_an_old_file_of_sentencepiece_names_no_end() -> None:
    fields = sentencepiece()
    del fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.bos_token_id"]
    assert ends_of(fields) == ["</s>"]
    fields[_TYPES] = np.array(fields[_TYPES])
    assert tokenizer_config_json(Header(Path("m"), fields, {}))["bos_token"] == "<s>"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", "bert", "tokenizer.ggml.model is 'bert', which is not supported"),
        ("pre", "viking", "tokenizer.ggml.pre is 'viking', which is not supported"),
        ("merges", ["ab"], "tokenizer.ggml.merges: 'ab' is not a pair"),
        ("merges", ["zz qq"], "tokenizer.ggml.merges: ('zz', 'qq') makes no token"),
        ("merges", "a b", "tokenizer.ggml.merges is not a list of texts"),
        ("token_type", [1, 1], "token_type does not have a number for each of its"),
    ],
)
def test_what_is_refused(field: str, value: Any, says: str, tmp_path: Path) -> None:
    fields = fields_of(hf_tokenizer("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{field}": value}
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(written(tmp_path, fields))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    for more, says in (
        ({}, "it has no tokenizer "),
        ({"tokenizer.ggml.model": "llama"}, "no tokens"),
    ):
        with pytest.raises(ConfigError, match=says):
            header = {"general.architecture": "llama", **more}
            load_tokenizer(write_gguf(tmp_path / "m.gguf", header, {}))


def test_old_files_name_no_cut() -> None:
    fields = fields_of(hf_tokenizer("qwen2"), "default") | {"general.architecture": "qwen2"}
    del fields["tokenizer.ggml.token_type"]
    assert tokenizer_json(Header(Path("m"), fields, {}))["normalizer"] == {"type": "NFC"}


def test_chats(tmp_path: Path) -> None:
    fields = fields_of(hf_tokenizer("smollm"), "smollm")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    path = written(tmp_path, fields | {"tokenizer.chat_template": template})
    chat = load_chat_template(str(path))
    try:
        text = chat.render([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
        assert (chat.own, text) == (True, "<|im_start|>Hi<|im_end|>")
        assert chat.encode(text, load_tokenizer(path).encode)[::2] == [1, 2] or len(text) > 3
    finally:
        chat.close()
    assert not load_chat_template(str(written(tmp_path, fields))).own
    with pytest.raises(ConfigError, match=r"tokenizer\.chat_template is not text"):
        load_chat_template(str(written(tmp_path, fields | {"tokenizer.chat_template": 5})))
