"""What the files of a checkpoint say of its tokenizer beside tokenizer.json: which tokens are
special, and what chats look like.

transformers has written it to tokenizer_config.json since 2023, and before that to
special_tokens_map.json and added_tokens.json. A GGUF file has the same in its header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.checkpoint_files import find_gguf, read_json, read_text
from jaxserve.gguf.header import GGUFError, read_header
from jaxserve.gguf.tokenizer import tokenizer_config_json

CONFIG = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
MAX_TOKENIZER = 256 << 20
"""Bytes of a tokenizer.json; the longest have some 35 MiB."""
_MAP, _ADDED, _DECODER = "special_tokens_map.json", "added_tokens.json", "added_tokens_decoder"
_TEMPLATE, _TEMPLATES, _PROCESSOR = (
    "chat_template.jinja", "additional_chat_templates", "chat_template.json"
)  # fmt: skip
DEFAULT, TOOL_USE = "default", "tool_use"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_MOST_TEMPLATES = 16
_LISTS = ("additional_special_tokens", "extra_special_tokens")


class AddedToken(NamedTuple):
    """A token that is found in a text before it is cut.

    Attributes:
        content: its text.
        special: whether it is no text of an answer.
        id: None where only a name, such as bos_token, is given to it.
        flags: as tokenizer.json has them.
    """

    content: str
    special: bool
    id: int | None
    flags: Mapping[str, bool]


def read_config(path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json, with the special tokens of special_tokens_map.json; of
    a GGUF file what it would be. Empty where there is none.

    Raises:
        ValueError: a file cannot be read; the message names it.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        try:
            return tokenizer_config_json(read_header(gguf))
        except GGUFError as error:
            raise ValueError(str(error)) from None
    config, named = (_object(path / name) for name in (CONFIG, _MAP))
    # As transformers: what is older counts where the newer form is not there.
    first, then = (config, named) if _DECODER in config else (named, config)
    return {**then, **{name: value for name, value in first.items() if value is not None}}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates have for them, such as bos_token."""
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text}


def added_tokens(folder: Path, config: Mapping[str, Any]) -> list[AddedToken]:
    """Those that tokenizer.json may lack, by id, and those without one last. config: of
    `read_config`. Raises ValueError."""
    named = [value for name, value in config.items() if name.endswith("_token")]
    for name in _LISTS:
        more = config.get(name)
        if isinstance(more, dict):  # by names of their own
            more = list(more.values())
        named += more if isinstance(more, list) else []
    special = {text: value for value in named if (text := _content(value))}
    found = {
        text: AddedToken(text, True, None, _flags(value, False)) for text, value in special.items()
    }
    for text, i in _object(folder / _ADDED).items():
        _check_id(folder / _ADDED, text, i)
        flags = _flags(special.get(text), text not in special)
        found[text] = AddedToken(text, text in special, i, flags)
    decoder = config.get(_DECODER) or {}
    if not isinstance(decoder, dict):
        raise ValueError(f"{folder / CONFIG}: {_DECODER} is no object")
    for key, value in decoder.items():
        content = _content(value)
        if not content:
            raise ValueError(f"{folder / CONFIG}: {_DECODER}: {key!r:.80} has no content")
        i = int(key) if key.isdecimal() and key.isascii() and len(key) < 10 else key
        _check_id(folder / CONFIG, content, i)
        is_special = bool(isinstance(value, dict) and value.get("special"))
        found[content] = AddedToken(content, is_special, i, _flags(value, not is_special))
    last = 1 << 40
    return sorted(found.values(), key=lambda token: last if token.id is None else token.id)


def chat_templates(path: Path, config: Mapping[str, Any], most: int) -> dict[str, tuple[str, Path]]:
    """Chat templates by name, such as DEFAULT and TOOL_USE, each with the file that has it.

    Args:
        path: the folder or GGUF file.
        config: of `read_config`.
        most: bytes of a template.

    Raises:
        ValueError: a file cannot be read, or a template is too long.
    """
    found: dict[str, tuple[str, Path]] = {}

    def add(name: Any, source: Any, where: Path) -> None:
        if isinstance(name, str) and isinstance(source, str):
            if len(source) > most:
                size = f"it has {len(source):,} characters, and {most:,} are allowed"
                raise ValueError(f"the chat template in {where}: {size}")
            found[name] = source, where

    own = read_if_there(path / _TEMPLATE, read_text, most)
    if own is not None:  # it stands for all that is said elsewhere
        add(DEFAULT, own, path / _TEMPLATE)
    else:
        processor = _object(path / _PROCESSOR)
        given, where = processor.get("chat_template"), path / _PROCESSOR
        if "chat_template" in config:
            given, where = config["chat_template"], find_gguf(path) or path / CONFIG
        if isinstance(given, dict):
            given = [{"name": name, "template": source} for name, source in given.items()]
        several = given if isinstance(given, list) else [{"name": DEFAULT, "template": given}]
        for each in several:
            if isinstance(each, dict):
                add(each.get("name"), each.get("template"), where)
    for file in sorted((path / _TEMPLATES).glob("*.jinja"))[:_MOST_TEMPLATES]:
        add(file.stem, read_if_there(file, read_text, most), file)
    return found


def token_id(folder: Path, config: Mapping[str, Any], text: str) -> int | None:
    """The id of a token, by these files; None where they have none of it. Raises ValueError."""
    added = {token.content: token.id for token in added_tokens(folder, config)}
    if (found := added.get(text)) is not None:
        return found
    spec = _object(folder / TOKENIZER, MAX_TOKENIZER)
    for token in spec.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == text:
            return _int(token.get("id"))
    model = spec.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # of pieces with scores
        pieces = (piece[0] if isinstance(piece, list) and piece else None for piece in vocabulary)
        return next((i for i, piece in enumerate(pieces) if piece == text), None)
    return _int(vocabulary.get(text)) if isinstance(vocabulary, dict) else None


def read_if_there(file: Path, read: Callable[..., Any], *limits: int) -> Any:
    """What `read` makes of a file; None where there is none. Raises ValueError naming the file."""
    try:
        return read(file, *limits)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {file}: {error}") from None


def _object(file: Path, *limits: int) -> dict[str, Any]:
    found = read_if_there(file, read_json, *limits)
    return found if isinstance(found, dict) else {}


def _content(value: Any) -> str:
    """The text of a token that is given as text, or as an object with it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _flags(value: Any, normalized: bool) -> dict[str, bool]:
    given = value if isinstance(value, dict) else {}
    default = {**dict.fromkeys(_FLAGS, False), "normalized": normalized}
    return {name: bool(given.get(name, default[name])) for name in _FLAGS}


def _check_id(file: Path, text: str, value: Any) -> None:
    if _int(value) is None or not 0 <= value < 1 << 31:
        raise ValueError(f"{file}: {text!r:.80} has the id {value!r:.80}, which is none")


def _int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
