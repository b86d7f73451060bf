"""Flags that several commands have: of access, and of what the text has to be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.client.connection import KEY_VARIABLE, Tls


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Those for servers that want a key, or speak TLS."""
    group = parser.add_argument_group("access")
    key = group.add_mutually_exclusive_group()
    key.add_argument(
        "--api_key",
        metavar="KEY",
        help="which others on this machine see in the list of processes: rather --api_key_file, or "
        f"the environment's {KEY_VARIABLE}",
    )
    key.add_argument("--api_key_file", metavar="FILE", help="the file's first line is the key")
    group.add_argument("--tls", action="store_true", help="TLS; the flags below say so, too")
    group.add_argument("--tls_ca", metavar="FILE", help="PEM, CAs to trust (public ones)")
    group.add_argument("--tls_cert", metavar="FILE", help="PEM, one's own certificate, for mTLS")
    group.add_argument("--tls_key", metavar="FILE", help="PEM, its key")


def read_key(args: argparse.Namespace) -> str | None:
    """The key; None where the flags have none. Raises ValueError for an empty file, OSError."""
    given: str | None = args.api_key
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text(encoding="utf-8", errors="replace").split()
        given = lines[0] if lines else ""
    if given is not None and not given.strip():
        raise ValueError("--api_key: is empty")
    return given


def read_tls(args: argparse.Namespace) -> Tls | None:
    """None where it is not asked for. Raises ValueError for half of a pair."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls_cert and --tls_key go together")
    files = (args.tls_ca, args.tls_cert, args.tls_key)
    return Tls(*files) if args.tls or any(files) else None


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
