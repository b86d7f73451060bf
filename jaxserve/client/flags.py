"""Flags that several commands share: for access, and for the format of the text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from jaxserve.client.connection import KEY_VARIABLE, Tls


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for servers that need a key or speak TLS."""
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
    """The API key; None if no flag gives one. Raises OSError, and ValueError for an empty file."""
    key: str | None = args.api_key
    if args.api_key_file is not None:
        lines = Path(args.api_key_file).read_text(encoding="utf-8", errors="replace").split()
        key = lines[0] if lines else ""
    if key is not None and not key.strip():
        raise ValueError("--api_key: is empty")
    return key


def read_tls(args: argparse.Namespace) -> Tls | None:
    """The TLS settings; None without TLS. Raises ValueError if only one of a certificate and its
    key is given."""
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ValueError("--tls_cert and --tls_key go together")
    files = (args.tls_ca, args.tls_cert, args.tls_key)
    return Tls(*files) if args.tls or any(files) else None


def add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of grammars, of which one may be given."""
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
    """The fields of a `Grammar`; None for any text. Raises OSError, and ValueError for a file that
    is not text."""
    if args.json_schema is not None:
        return {"json_schema": _text(args.json_schema)}
    if args.regex is not None:
        return {"regex": args.regex}
    if args.choice is not None:
        return {"choice": {"texts": args.choice}}
    return {"json_object": {}} if args.json_object else None


def _text(path: str) -> str:
    if not path.startswith("@"):
        return path
    try:
        return Path(path[1:]).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--json_schema: {path[1:]} is not UTF-8") from None
