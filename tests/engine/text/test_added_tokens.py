"""Tokens that only the files beside tokenizer.json name are found whole, and special ones are no
text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from jaxserve.config import ConfigError
from jaxserve.engine.text.detokenizer import load_tokenizer
from tests.engine.text.tokenizers_for_tests import byte_level

SIZE = byte_level().get_vocab_size()  # the first id that is free
START, END = "<|im_start|>", "<|im_end|>"
TEXT = f"{START}Once{END}"


def write(folder: Path, files: dict[str, Any]) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def decoder(**tokens: int) -> dict[str, Any]:
    return {str(i): {"content": f"<|{name}|>", "special": True} for name, i in tokens.items()}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": decoder(im_start=SIZE, im_end=SIZE + 1)}},
        {"tokenizer_config": {"added_tokens_decoder": decoder(im_end=SIZE + 1, im_start=SIZE)}},
        {
            "added_tokens": {END: SIZE + 1, START: SIZE},
            "special_tokens_map": {"additional_special_tokens": [START], "eos_token": END},
        },
        {
            "added_tokens": {START: SIZE, END: SIZE + 1},
            "tokenizer_config": {
                "additional_special_tokens": [{"content": START}],
                "eos_token": {"content": END, "lstrip": False},
            },
        },
    ],
    ids=["decoder", "another order", "map", "config"],
)
def test_tokens_of_the_other_files(files: dict[str, Any], tmp_path: Path) -> None:
    plain = load_tokenizer(write(tmp_path, {}))
    assert len(plain.encode(TEXT)) > 10
    once = plain.encode("Once", special=False)
    found = load_tokenizer(write(tmp_path, files))
    ids = [SIZE, *once, SIZE + 1]
    assert found.encode(TEXT, special=False) == ids
    assert found.decode(ids) == "Once"
    assert found.piece(SIZE) == START.encode()
    stream = found.detokenizer()
    assert stream.feed(ids) + stream.flush() == "Once"


def test_a_token_that_is_no_special_one_is_text(tmp_path: Path) -> None:
    found = load_tokenizer(write(tmp_path, {"added_tokens": {"<think>": SIZE}}))
    assert found.encode("a<think>", special=False)[-1] == SIZE
    assert found.decode([SIZE]) == "<think>"


def test_ids_that_leave_a_gap(tmp_path: Path) -> None:
    """As the file says, and not the next one that is free."""
    found = load_tokenizer(write(tmp_path, {"added_tokens": {START: SIZE + 7}}))
    assert found.encode(START, special=False) == [SIZE + 7]
    own = byte_level().token_to_id("<tool é>")  # which the vocabulary itself does not have either
    assert found.encode("<tool é>", special=False) == [own]


def test_ids_of_a_vocabulary_that_is_a_list(tmp_path: Path) -> None:
    """Where the next ids are the only ones that can be."""
    Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 2, "<y>": 3}))
    assert load_tokenizer(tmp_path).encode("a<y>a<x>") == [1, 3, 1, 2]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": 5}))
    with pytest.raises(ConfigError, match=r"'<x>' is token 5 by .*leaves a gap: it would be 2"):
        load_tokenizer(tmp_path)


def test_a_token_that_the_model_has_no_row_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as one for padding, which nobody sends."""
    load_tokenizer(write(tmp_path, {"added_tokens": {"[PAD]": SIZE}}), SIZE)
    assert f"has an id {SIZE} ('[PAD]')" in caplog.text


def test_a_name_makes_a_token_of_the_vocabulary_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("<s>a") == [0]
    named = {"bos_token": "<s>", "pad_token": "<none>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
    found = load_tokenizer(tmp_path)
    assert found.encode("<s>a") == [1, 2]
    assert found.decode([1, 2]) == "a"
    assert found.encode("<none>") == [0]  # a name for a token that the model does not have


def test_flags_of_a_token(tmp_path: Path) -> None:
    swallowing = {"content": "<mask>", "special": True, "lstrip": True}
    known = {**swallowing, "content": "</s>"}  # which tokenizer.json has without that
    config = {"added_tokens_decoder": {str(SIZE): swallowing, "1": known}}
    found = load_tokenizer(write(tmp_path, {"tokenizer_config": config}))
    once = found.encode("Once", special=False)
    assert found.encode("Once   <mask>", special=False) == [*once, SIZE]
    assert found.encode("Once   </s>", special=False) == [*once, 1]


def test_the_files_contradict_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = load_tokenizer(write(tmp_path, {"added_tokens": {"</s>": SIZE, "<x>": 5}}))
    assert found.encode("</s>", special=False) == [1]
    assert f"token {SIZE} is '</s>', which it has as 1" in caplog.text
    assert "token 5 is '<x>'" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("added_tokens", {"<x>": -1}, "added_tokens.json: '<x>' has the id -1, which is none"),
        ("added_tokens", {"<x>": 1 << 40}, "has the id 1099511627776, which is none"),
        ("added_tokens", {"<x>": "5"}, "has the id '5', which is none"),
        ("tokenizer_config", {"added_tokens_decoder": {"a": {"content": "<x>"}}}, "has the id 'a'"),
        ("tokenizer_config", {"added_tokens_decoder": {"5": {}}}, "'5' has no content"),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder is no object"),
    ],
)
def test_what_is_refused(name: str, content: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(write(tmp_path, {name: content}))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    write(tmp_path, {})
    (tmp_path / "added_tokens.json").write_text("{")
    with pytest.raises(
        ConfigError, match=r"cannot read .*added_tokens\.json: it is not valid JSON"
    ):
        load_tokenizer(tmp_path)
