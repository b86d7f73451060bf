"""Values as Python literals, which some models write."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

MAX_LITERAL = 1 << 16
"""Most characters that are parsed at once."""
_JSON_NAMES = {"true": True, "false": False, "null": None}


def read_literal(text: str) -> Any:
    """The value of a literal. Raises ValueError for text that is not a literal, or has no
    equivalent in JSON."""
    if len(text) > MAX_LITERAL:
        raise ValueError("is too long")
    try:
        value = literal_value(ast.parse(text, mode="eval").body, text.encode().split(b"\n"))
        json.dumps(value, allow_nan=False)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error
    return value


def literal_value(node: ast.expr, lines: Sequence[bytes]) -> Any:
    """The value of a literal in Python or JSON. lines: the source's lines. Raises ValueError for
    other nodes."""
    match node:
        case ast.Constant(value=str() as text):
            # Some JSON escapes do not exist in Python.
            if node.lineno == node.end_lineno:
                source = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
                try:
                    return json.loads(source)
                except ValueError:
                    pass
            return text
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [literal_value(one, lines) for one in each]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else literal_value(key, lines) for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("names are strings")
            return dict(zip(names, (literal_value(one, lines) for one in values), strict=True))
    raise ValueError("no literal")
