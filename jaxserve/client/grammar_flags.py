"""Flags that say what the text has to be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """A group of its own, of which one is taken."""
    kinds = parser.add_argument_group(
        "structured output", "What the text is held to; at most one."
    ).add_mutually_exclusive_group()
    kinds.add_argument(
        "--json_schema",
        metavar="SCHEMA",
        help="JSON that is valid by this JSON Schema, or by that in a file, as @FILE",
    )
    kinds.add_argument("--json_object", action="store_true", help="any JSON object")
    kinds.add_argument("--regex", help="what this expression matches, all of it")
    kinds.add_argument("--choice", action="append", help="one of these; repeatable")


def read_grammar(args: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of a `Grammar`; None: any text. Raises OSError, and ValueError for a file that is
    no text."""
    if args.json_schema is not None:
        return {"json_schema": _text(args.json_schema)}
    if args.regex is not None:
        return {"regex": args.regex}
    if args.choice is not None:
        return {"choice": {"texts": args.choice}}
    return {"json_object": {}} if args.json_object else None


def _text(given: str) -> str:
    if not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--json_schema: {given[1:]} is not UTF-8") from None
