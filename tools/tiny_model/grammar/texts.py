"""The files of texts: plots.txt and words.txt, by the indentation of their lines."""

from __future__ import annotations

import functools
from pathlib import Path

Paragraph = tuple[str, list[str]]  # its head, indented by 2, and its lines, by 4


def read(name: str) -> dict[str, list[Paragraph]]:
    """The paragraphs of each part of a file. A line indented by more than 4 continues
    the previous one; a line that begins with a hash is a comment."""
    parts: dict[str, list[Paragraph]] = {}
    paragraphs: list[Paragraph] = []
    for line in (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if not text or text.startswith("#"):
            continue
        if indent == 0:
            paragraphs = parts[text] = []
        elif indent == 2:
            paragraphs.append((text, []))
        elif indent == 4:
            paragraphs[-1][1].append(text)
        else:
            paragraphs[-1][1][-1] += f" {text}"
    return parts


@functools.cache
def rows(*lines: str) -> list[list[str]]:
    """Rows with semicolons between them, their columns with slashes."""
    return [[cell.strip() for cell in row.split("/")] for row in " ".join(lines).split(";")]


WORDS = {name: rows(*lines) for part in read("words.txt").values() for name, lines in part}
