"""Shared parts of the bench's commands: flags and their ranges, the configuration of their engine,
the output of results."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxserve.command_line import Parser
from jaxserve.config import Config
from jaxserve.configs import base
from jaxserve.server.startup import launch
from jaxserve.server.startup.launch import UsageError

DEFAULT_CONFIG = Path(base.__file__).parent / "tiny_cpu.py"


class BenchParser(Parser):
    """The parser of `jaxserve bench NAME`.

    Args:
        name: name of the command.
        json: whether it has a flag --json, see `tell`.
        options: options of `Parser`.
    """

    def __init__(self, name: str, *, json: bool = True, **options: Any) -> None:
        super().__init__(prog=f"jaxserve bench {name}", **options)
        self.set_defaults(command=name)
        self._least: dict[str, int | None] = {}
        if json:
            self.add_argument(
                "--json", action="store_true", help="one JSON object as the last line"
            )

    def number(
        self,
        name: str,
        default: float | None,
        text: str,
        *,
        least: int | None = 1,
        required: bool = False,
    ) -> None:
        """Adds a flag --name for a number, which `check` will check.

        Args:
            name: name of the flag, without dashes.
            default: None for no default.
            text: help.
            least: smallest allowed whole number; None for any positive number, whole or not.
            required: whether the flag must be given.
        """
        kind, shown = float if least is None else int, "" if default is None else " (%(default)s)"
        add, told = self.add_argument, text + shown
        add(f"--{name}", type=kind, default=default, required=required, help=told)
        self._least[name] = least

    def check(self, args: argparse.Namespace) -> None:
        """Raises UsageError for a number out of range."""
        for name, least in self._least.items():
            value = getattr(args, name)
            if value is None:
                continue
            if least is None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"--{name} must be a positive number, got {value}")
            if least is not None and value < least:
                raise UsageError(f"--{name} must be at least {least}, got {value}")

    def parse_serving(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parses and checks a command line that also has flags of serve.py.

        Returns:
            The arguments, with the engine's configuration as `config`, and the flags of serve.py.

        Raises:
            UsageError, ConfigError: the command line or the configuration is wrong.
        """
        args, rest = self.parse_known_args(argv)
        self.check(args)
        args.config = self.read_config(rest)
        return args, rest

    def read_config(self, argv: Sequence[str]) -> Config:
        """The configuration from --config, --model, --policy, --config.x.y= and so on; other flags
        are not allowed. Raises UsageError or ConfigError."""
        return read_config(argv, self.flags())


def read_config(argv: Sequence[str], own_flags: Sequence[str] = ()) -> Config:
    """See `BenchParser.read_config`. own_flags: further flags of the command."""
    values = flags.FlagValues()
    launch.parse_flags(["jaxserve.bench", *argv], str(DEFAULT_CONFIG), values, own_flags)
    for name in ("port", "http_port", "metrics_port"):
        if values[name].value is not None:
            raise UsageError(f"--{name} is for serve.py; the bench opens no port")
    return launch.read_config(values)


def served_by(result: Mapping[str, Any]) -> str:
    """The model, its dtype and its device."""
    info = result["model"]
    return f"{info['model']} ({info['dtype']}, {info['device']})"


def on_machine(result: Mapping[str, Any]) -> str:
    """The machine of the measurement."""
    where = result["machine"]
    return f"on {where['cpu']}, {where['cores']} cores, load {where['load_average']}"
