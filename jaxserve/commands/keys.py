"""API keys of a server: makes, lists and revokes them.

    jaxserve keys new alice --rate=60 --concurrency=4 --file=keys.txt
    jaxserve keys list --file=keys.txt
    jaxserve keys revoke alice --file=keys.txt
    jaxserve serve --config.server.api_keys=keys.txt

A key is shown once, on stdout; the file has its hash. Servers read a changed file within a second,
and running calls continue. A new key with an old name takes over the batches of that name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.command_line import Parser
from jaxserve.server.access.key_file import (
    LIMITS,
    ApiKey,
    check_limit,
    check_name,
    check_other,
    digest_of,
    make_key,
    new_secret,
    parse_line,
    parse_lines,
)
from jaxserve.writable import check_file, replace_file


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 for a file that cannot be used, 2 for a wrong command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    path = None if args.file is None else Path(args.file)
    try:
        if args.command == "new":
            given = {name: getattr(args, name) for name in LIMITS}
            limits = {n: check_limit(f"--{n}", v) for n, v in given.items() if v is not None}
            _new(check_name(args.name), limits, path)
        elif args.command == "revoke":
            _revoke(check_name(args.name), Path(args.file))
        else:
            _list(Path(args.file))
    except (OSError, _Refused) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"jaxserve keys: {told}", file=sys.stderr)
        return 1
    except ValueError as error:
        parser.error(str(error))
    return 0


class _Refused(Exception):
    """The file does not fit the request."""


def _new(name: str, limits: dict[str, Any], path: Path | None) -> None:
    secret = new_secret()
    key = make_key(name, digest_of(secret.encode()), limits)
    if path is not None:
        check_file("file", path)
        text = _read(path) if path.exists() else ""
        try:
            check_other(parse_lines(text, str(path)), key)
        except ValueError as error:
            raise _Refused(f"{error}; revoke the old one first") from None
        joint = "" if not text or text.endswith("\n") else "\n"
        replace_file(path, [f"{text}{joint}{key.line()}\n".encode()])
        print(secret)
        print(f"jaxserve keys: {path} has its hash; it is not shown again", file=sys.stderr)
        return
    print(secret)
    print("jaxserve keys: this line is for the file, server.api_keys:", file=sys.stderr)
    print(key.line())


def _list(path: Path) -> None:
    keys = _keys(path)
    width = max((len(key.name) for key in keys), default=0)
    for key in keys:
        said = [f"{limit} {value}" for limit, value in key.limits.items()]
        print(f"{key.name:<{width}}  {key.digest[:8]}...  {', '.join(said) or 'no limits'}")


def _revoke(name: str, path: Path) -> None:
    if name not in (key.name for key in _keys(path)):
        raise _Refused(f"{path} has no key named {name}")
    check_file("file", path)
    lines = _read(path).splitlines(keepends=True)
    kept = [line for line in lines if (key := parse_line(line)) is None or key.name != name]
    replace_file(path, [line.encode() for line in kept])


def _keys(path: Path) -> list[ApiKey]:
    try:
        return parse_lines(_read(path), str(path))
    except ValueError as error:
        raise _Refused(str(error)) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise _Refused(f"{path} is not UTF-8") from None


def _parser() -> Parser:
    parser = Parser(prog="jaxserve keys", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="new|list|revoke")
    new = commands.add_parser("new", help="make a key")
    new.add_argument("name", help="its owner or purpose, shown in logs")
    for limit, words in LIMITS.items():
        new.add_argument(f"--{limit}", help=words)
    new.add_argument("--file", help="file to add its line to; otherwise the line is printed")
    shown = commands.add_parser("list", help="list the keys")
    shown.add_argument("--file", required=True, help="the server's api_keys")
    revoke = commands.add_parser("revoke", help="ends one")
    revoke.add_argument("name")
    revoke.add_argument("--file", required=True, help="the server's api_keys")
    return parser
