"""Prompts from a file: plain lines, or for a batch JSON.

    {"id": "a", "prompt": "Once upon a time", "sampling": {"max_tokens": 64}}
    {"token_ids": [5, 6, 7]}

`prompt` or `token_ids` is required. `id`, a name of your own, and `sampling`, fields of
SamplingParams, are optional. Blank lines are skipped.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.client.messages import make_line
from jaxserve.server.proto import batches_pb2 as pb

STDIN = "-"
_CACHE = ("cache_salt", "prompt_cache_key")
_BOOLEANS = ("ignore_eos", "deterministic")  # of the sampling parameters
_FIELDS = ("id", "prompt", "token_ids", "sampling", *_CACHE)
_MAX_ID = 128
_MAX_BYTES = 6 << 20  # of a message; the server takes 8 MiB in one call


class PromptError(ValueError):
    """The file is malformed or has no prompts; the message names file, line and field."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of a file.

    Attributes:
        path: the file.
        numbers: line numbers of the prompts in it, from 1.
        lines: a batch line for each prompt.
    """

    path: Path
    numbers: list[int]
    lines: list[pb.BatchLine]

    def digest(self) -> str:
        """SHA-256 of all prompts and their parameters, in hex. The same file with the same defaults
        has the same digest."""
        whole = hashlib.sha256()
        for number, line in zip(self.numbers, self.lines, strict=True):
            text = line.SerializeToString(deterministic=True)
            whole.update(f"{number} {len(text)} ".encode() + text)
        return whole.hexdigest()


def read_prompts(path: Path, defaults: Mapping[str, Any]) -> Prompts:
    """Reads a file of prompts as lines of a batch. defaults: sampling parameters for lines that do
    not set them.

    Raises PromptError for the first malformed line, OSError, UnicodeDecodeError.
    """
    numbers: list[int] = []
    lines: list[pb.BatchLine] = []
    seen: dict[str, int] = {}
    with open(path, encoding="utf-8-sig") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                line = _line(text, defaults)
                if line.id and (before := seen.setdefault(line.id, number)) != number:
                    raise ValueError(f"id: {line.id!r} is line {before}'s")
            except ValueError as error:
                raise PromptError(f"{path}, line {number}: {error}") from None
            numbers.append(number)
            lines.append(line)
    if not lines:
        raise PromptError(f"{path}: there are no prompts in it")
    return Prompts(path, numbers, lines)


def read_lines(source: str) -> dict[int, str]:
    """The prompts by the numbers of their lines, from 1. source: a path, or "-" for stdin.

    A line ends with LF, CR LF or CR, and nothing else; a byte order mark is dropped. Blank lines
    are skipped. Raises OSError, UnicodeDecodeError, and PromptError if no line is left.
    """
    stdin = source == STDIN
    raw = sys.stdin.buffer.read() if stdin else Path(source).read_bytes()
    lines = enumerate(io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig"), start=1)
    prompts = {number: line.removesuffix("\n") for number, line in lines if line.strip()}
    if not prompts:
        raise PromptError(f"{'stdin' if stdin else source}: there are no prompts in it")
    return prompts


def _line(text: str, defaults: Mapping[str, Any]) -> pb.BatchLine:
    """Raises ValueError."""
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("is not JSON that anybody can read: too many brackets") from None
    if not isinstance(fields, dict):
        raise ValueError('must be an object, as {"prompt": "Once upon a time"}')
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known ones are {', '.join(_FIELDS)}")
    if ("prompt" in fields) == ("token_ids" in fields):
        raise ValueError("needs either prompt or token_ids")
    name = fields.get("id", "")
    if not isinstance(name, str) or len(name) > _MAX_ID:
        raise ValueError(f"id: must be a string of at most {_MAX_ID} characters")
    prompt = (
        _text("prompt", fields["prompt"]) if "prompt" in fields else _tokens(fields["token_ids"])
    )
    cache = {field: _text(field, fields.get(field, "")) for field in _CACHE}
    sampling = {**defaults, **_sampling(fields.get("sampling", {}))}
    try:
        line = make_line(prompt, line_id=name, **cache, **sampling)
    except UnicodeEncodeError:
        raise ValueError("holds half a character (an unpaired surrogate)") from None
    if line.ByteSize() > _MAX_BYTES:
        raise ValueError(f"takes {line.ByteSize():,} bytes; at most {_MAX_BYTES:,} can be sent")
    return line


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field}: must be a string")
    return value


def _tokens(value: Any) -> list[int]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("token_ids: must be a list of integers")
    if any(not -(2**31) <= token < 2**31 for token in value):
        raise ValueError("token_ids: must be 32-bit integers")
    return value


def _sampling(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("sampling: must be an object")
    fields = dict(value)
    for name, field_value in fields.items():  # protobuf would take these for a number or a list
        if field_value is None:
            continue
        if isinstance(field_value, bool) is not (name in _BOOLEANS):
            may = "must" if name in _BOOLEANS else "must not"
            raise ValueError(f"{name}: {may} be true or false")
        if isinstance(field_value, dict) and name not in ("logit_bias", "grammar"):
            raise ValueError(f"{name}: must not be an object")
    if fields.get("logit_bias") is not None:
        fields["logit_bias"] = _bias(fields["logit_bias"])
    return fields


def _bias(value: Any) -> dict[int, float]:
    try:
        if not any(isinstance(number, bool) for number in value.values()):
            return {int(token): number for token, number in value.items()}
    except (AttributeError, ValueError):
        pass
    raise ValueError('logit_bias: must be an object, as {"17": -1.5}')
