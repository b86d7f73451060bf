"""Copies to and from host memory, read off what the compiler made of a program."""

from __future__ import annotations

import re

_SPACE = "S(5)"  # host memory in XLA's layouts
# What an asynchronous copy writes to, and what it reads, with their layouts.
_START = re.compile(r"(%[\w.-]+) = \((\S+), (\S+), \S+\) copy-start\(")
_DONE = re.compile(r" copy-done\((%[\w.-]+)\)")


def host_copies(text: str) -> tuple[int, int]:
    """How many asynchronous copies go to host memory, and how many come from there, by the text of
    a compiled program: each with a start and a done."""
    done = set(_DONE.findall(text))
    found = [0, 0]
    for name, target, source in _START.findall(text):
        ends = (_SPACE in target, _SPACE in source)
        if name in done and ends[0] != ends[1]:
            found[ends[1]] += 1
    return found[0], found[1]
