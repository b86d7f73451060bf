"""The command `jaxserve`: its subcommands, each imported only when it is named."""

from __future__ import annotations

import difflib
import gc
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxserve import __version__
from jaxserve.command_line import run
from jaxserve.extras import LAB, problem

COMMANDS = {
    "serve": ("jaxserve.commands.serve", "main", "serve a model over gRPC and HTTP"),
    "chat": ("jaxserve.client.chat", "main", "talk with the model that a server has"),
    "complete": ("jaxserve.client.cli", "complete", "continue a prompt, or a file of them"),
    "embed": ("jaxserve.client.cli", "embed", "make the vector of a text, or of a file of them"),
    "batch": ("jaxserve.client.cli", "batch", "have a file of prompts done when there is time"),
    "bench": ("jaxserve.bench.cli", "main", "measure engine, server, kernels and policies"),
    "simulate": ("jaxserve.simulator.simulate.cli", "main", "serve traffic on a simulated device"),
    "advise": ("jaxserve.simulator.advise.cli", "main", "say which policy suits one's own traffic"),
    "observe": ("jaxserve.twin.cli", "main", "make a twin of a server that is seen from outside"),
    "size": ("jaxserve.simulator.size.cli", "main", "say how many replicas a rate needs"),
    "optimal": ("jaxserve.simulator.optimal.cli", "main", "find the best schedule there is"),
    "policies": (
        "jaxserve.commands.policies",
        "main",
        "list scheduling policies and their parameters",
    ),
    "profile": ("jaxserve.commands.profile", "main", "measure this machine for the simulator"),
    "convert": ("jaxserve.commands.convert", "main", "convert a checkpoint to Orbax"),
    "keys": ("jaxserve.commands.keys", "main", "make, list and revoke API keys"),
    "compile-check": (
        f"{LAB}.compile_check.cli",
        "main",
        "compile kernels and steps for devices that are not there (lab)",
    ),
}
"""By name: the module, the function in it that takes the arguments and returns the exit code, and
what the subcommand does."""


def entry_point() -> NoReturn:
    """Entry point of the installed script and of `python -m jaxserve`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ^C ends the process at once during imports
    run(lambda: main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs a subcommand.

    Args:
        argv: its name and its arguments, without the program's name.

    Returns:
        The exit code: the subcommand's, 2 if there is no such subcommand, or 1 if something it
            needs is not installed.
    """
    name = argv[0] if argv else "--help"
    if name in ("--help", "-h", "help"):
        print(_help_text(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if name == "--version":
        print(f"jaxserve {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name.replace("_", "-"), COMMANDS, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"jaxserve: there is no command {name!r}{hint}", file=sys.stderr)
        print("jaxserve --help says what there is", file=sys.stderr)
        return 2
    module, function, _ = COMMANDS[name]
    if name == "serve":
        gc.disable()  # until it serves: garbage collection takes a seventh of a start
    try:
        command = getattr(importlib.import_module(module), function)
        if name != "serve":  # serve loads and compiles before it handles ^C
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(command(argv[1:]))
    except ModuleNotFoundError as error:
        if (text := problem(f"jaxserve {name}", error)) is None:
            raise
        print(text, file=sys.stderr)
        return 1


def _help_text() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: jaxserve COMMAND ...", "", "LLM serving in JAX with SLO-aware scheduling.", ""]
    lines += [f"  {name:<{width}}{text}" for name, (_, _, text) in COMMANDS.items()]
    lines += ["", "Commands marked (lab) need the extra lab, and so does a part of bench."]
    lines += ["jaxserve COMMAND --help says more; --version, and no more."]
    return "\n".join(lines)
