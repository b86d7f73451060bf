"""The parser of every command: argparse, brief about what is wrong."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxserve import __version__


class Parser(argparse.ArgumentParser):
    """Shows the description as it is written, takes no flag by half its name, takes dashes for the
    underscores in one, and says in two lines what is wrong with a command line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        version = f"jaxserve {__version__}"
        self.add_argument("--version", action="version", version=version, help="and no more")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, but says of an unknown flag which one may be meant."""
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            unknown = next((one for one in rest if one.startswith("--")), "")
            hint = did_you_mean(unknown.partition("=")[0], self.flags())
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse; --num-rows is --num_rows."""
        given = sys.argv[1:] if args is None else args
        given = with_underscores(given, self._option_string_actions)
        return super().parse_known_args(given, namespace)

    def flags(self) -> list[str]:
        """Its own, and those of its commands."""
        found = {name for name in self._option_string_actions if name.startswith("--")}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found.update(parser.flags())
        return sorted(found)

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: {message}\n{self.prog} --help says what there is\n")


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the program with what `main` returns, and quietly where nobody reads its output any more
    (`--help | head`).

    Args:
        main: the command.

    Raises:
        SystemExit: always; 141, as a shell says of a program that SIGPIPE has ended, for output
            that nobody reads.
    """
    try:
        try:
            code = main()
        finally:
            if sys.stdout is not None:  # as where it was closed from the start
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def exit_code(error: Exception) -> int:
    """What a command ends with whose work this error has ended.

    Returns:
        2 where another command line is needed, for a value that cannot be or a file that is not
        there; 1 where what was asked has failed.
    """
    wrong = (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    return 2 if isinstance(error, wrong) else 1


def run_reporting(name: str, work: Callable[[], int], *errors: type[Exception]) -> int:
    """Does a command's work, and says in a line what has ended it.

    Args:
        name: the command, for the line.
        work: returns the exit code.
        *errors: what may end it, beside ^C.

    Returns:
        The work's exit code, that of the error (`exit_code`), or 130 for ^C.
    """
    try:
        return work()
    except BrokenPipeError:
        raise  # nobody reads what it prints; see `run`
    except errors as error:
        print(f"{name}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


def print_result(args: argparse.Namespace, text: str, result: Mapping[str, Any]) -> None:
    """Prints the text; with --json to stderr, and the result as the last line of stdout."""
    print(text, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        sys.stderr.flush()
        print(json.dumps(result, allow_nan=False), flush=True)


def with_underscores(args: Sequence[str], known: Collection[str]) -> list[str]:
    """The command line with each flag as it is known that has dashes where that has underscores.

    Args:
        args: the arguments; those behind a lone `--` are left alone.
        known: the flags there are, `--` included.

    Returns:
        As many arguments as there were.
    """
    found = list(args)
    for place, argument in enumerate(found):
        if argument == "--":
            break
        name, equals, value = argument.partition("=")
        ours = "--" + name[2:].replace("-", "_")
        if name.startswith("--") and name not in known and ours in known:
            found[place] = f"{ours}{equals}{value}"
    return found


def did_you_mean(flag: str, known: Collection[str]) -> str:
    """What to add to the line about an unknown flag: the nearest known one; "" where none is.

    Args:
        flag: as it was given, `--` included.
        known: the flags there are, likewise.
    """
    near = difflib.get_close_matches(flag.replace("-", "_"), _spelled(known), n=1, cutoff=0.7)
    return f"; did you mean {_spelled(known)[near[0]]}?" if near else ""


def _spelled(known: Collection[str]) -> dict[str, str]:
    return {flag.replace("-", "_"): flag for flag in known}
