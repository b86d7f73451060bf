"""Prompts, one a line, from a file or a pipe."""

from __future__ import annotations

import io
import sys
from typing import BinaryIO

from jaxserve.client.batch_prompts import PromptError

STDIN = "-"


def read_lines(source: str) -> dict[int, str]:
    """The prompts by the numbers of their lines, from 1. source: a path, or "-" for stdin.

    A line ends with LF, CR LF or CR, and nothing else; a byte order mark is none of its text. Blank
    lines are skipped. Raises PromptError where nothing is left, OSError, UnicodeDecodeError.
    """
    if source == STDIN:
        prompts = _lines(io.BytesIO(sys.stdin.buffer.read()))
    else:
        with open(source, "rb") as file:
            prompts = _lines(file)
    if not prompts:
        name = "stdin" if source == STDIN else source
        raise PromptError(f"{name}: there are no prompts in it")
    return prompts


def _lines(file: BinaryIO) -> dict[int, str]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig")
    lines = ((number, line.removesuffix("\n")) for number, line in enumerate(text, start=1))
    return {number: line for number, line in lines if line.strip()}
