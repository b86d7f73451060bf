"""Flags for servers that want a key, or speak TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.client.connection import KEY_VARIABLE, Tls


def add_access_flags(parser: argparse.ArgumentParser) -> None:
    """A group of its own."""
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
