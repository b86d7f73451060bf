"""The parser of every command: argparse, brief about what is wrong."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from jaxserve import __version__


class Parser(argparse.ArgumentParser):
    """Shows the description as it is written, takes no flag by half its name, and says in two lines
    what is wrong with a command line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)
        version = f"jaxserve {__version__}"
        self.add_argument("--version", action="version", version=version, help="and no more")

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: {message}\n{self.prog} --help says what there is\n")
