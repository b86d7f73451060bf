"""What the clients' scripts share: they run checks and print a line of JSON for each.

`run_clients.py` starts a script with BASE_URL and MODEL as environment variables, in an environment
with the client but without jaxserve. A check is a function that returns a few words or nothing, and
raises if the client did not get what it asked for. Checks ignore the quality of the text; they test
what holds for any text, such as valid arguments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

BASE_URL = os.environ["BASE_URL"]
MODEL = os.environ["MODEL"]
KEY = "none"

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASK = "What is the weather in Rome in the next 3 days?"
_CHECKS: list[tuple[str, str, Callable[[], Any]]] = []


def check(what: str, needs: str = "/v1/chat/completions") -> Callable[[Any], Any]:
    """Registers a function as the check of `what`. needs: a path without which the check is
    skipped."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        _CHECKS.append((what, needs, function))
        return function

    return register


def is_weather(arguments: Any) -> None:
    """Raises AssertionError unless these arguments are valid for CITY."""
    assert isinstance(arguments, dict), arguments
    assert set(arguments) == {"city", "days"}, arguments
    assert arguments["city"] in ("Paris", "Rome", "Oslo"), arguments
    assert isinstance(arguments["days"], int) and 1 <= arguments["days"] <= 9, arguments


def main() -> None:
    """Runs the script's checks. Exits with 1 if one has failed."""
    with urllib.request.urlopen(f"{BASE_URL.removesuffix('/v1')}/openapi.json") as answer:
        paths = json.load(answer)["paths"]
    failed, loop = False, asyncio.Runner()  # one loop, as clients keep connections open
    for what, needs, function in _CHECKS:
        if needs not in paths:
            print(json.dumps({"what": what, "outcome": f"not tried: no {needs}"}), flush=True)
            continue
        try:
            result = function()
            words = loop.run(result) if inspect.iscoroutine(result) else result
            outcome = "works" if not words else f"works: {words}"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed = True
            traceback.print_exc(file=sys.stderr)
            first = next(iter(str(error).splitlines()), "")
            outcome = f"fails: {type(error).__name__}: {first[:200]}"
        print(json.dumps({"what": what, "outcome": outcome}), flush=True)
    loop.close()
    sys.exit(failed)
