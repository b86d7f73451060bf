"""The command line of `jaxserve chat`: a conversation with a server's model, over HTTP."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.client.connection import Tls
from jaxserve.client.errors import ServerError
from jaxserve.client.flags import add_access_flags, read_key, read_tls
from jaxserve.client.http_calls import DEFAULT_HTTP_ADDRESS, HttpCalls
from jaxserve.client.records import EXPECTED_MISSED, json_verdict_line
from jaxserve.command_line import Parser

HELP, RESET, EXIT = "/help", "/reset", "/exit"
COMMANDS = {HELP: "this list", RESET: "begins anew", EXIT: "ends, as ^D does"}
_COMMAND = re.compile(r"/[a-z]+")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 at the end of the input, 1 if the server refused a request, 2 for
    usage, 130 for ^C."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if not all(value > 0 for value in _targets(args).values()):
            raise ValueError("targets are milliseconds above 0")
        chat = Chat(args.address, read_key(args), read_tls(args), _options(args), args.system)
        if args.message is not None:
            _say(chat, args.message)
            return 0
        if sys.stdin.isatty():
            print(f"A line is a message. {HELP} lists commands, ^D ends.", file=sys.stderr)
        while (message := _read()) is not None:
            command = message.strip()
            if command == EXIT:
                break
            if command == RESET:
                chat.reset()
            elif _COMMAND.fullmatch(command):
                _help(command)
            elif command:
                _say(chat, message)
        return 0
    except (ServerError, OSError) as error:
        print(f"jaxserve chat: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # contradicting flags
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


class Chat:
    """A conversation with the model of a server, over HTTP.

    Args:
        address: "host:port" of the server's HTTP.
        api_key: API key for servers that need one; None takes the environment's JAXSERVE_API_KEY,
            if set.
        tls: TLS settings; None connects in the clear.
        options: more fields of each request's body, such as max_tokens.
        system: the system message.

    Attributes:
        expected_missed: whether the server has given up the targets of the latest answer.
        verdict: which targets were met, as a line; None without targets.
    """

    def __init__(
        self,
        address: str,
        api_key: str | None = None,
        tls: Tls | None = None,
        options: dict[str, Any] | None = None,
        system: str | None = None,
    ) -> None:
        self._calls = HttpCalls(address, api_key, tls)
        self._options = options or {}
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns = self._system
        self.expected_missed = False
        self.verdict: str | None = None

    def reset(self) -> None:
        """Forgets all turns but the system message."""
        self._turns = self._system

    def answers(self, message: str) -> Iterator[str]:
        """Yields the pieces of the answer as they come. If it raises ServerError, the message is
        not added to the conversation."""
        asked = [*self._turns, {"role": "user", "content": message}]
        pieces: list[str] = []
        self.expected_missed, self.verdict = False, None
        for piece in self._stream({"messages": asked, "stream": True, **self._options}):
            pieces.append(piece)
            yield piece
        self._turns = [*asked, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, body: dict[str, Any]) -> Iterator[str]:
        data = json.dumps(body).encode()
        with self._calls.call("POST", "/v1/chat/completions", data) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if data and data != b"[DONE]":
                    choices = _choices(data)
                    for choice in choices:
                        self._note(choice.get("slo") or {}, choice.get("timings") or {})
                    yield "".join(part["delta"].get("content") or "" for part in choices)

    def _note(self, slo: dict[str, Any], timings: dict[str, Any]) -> None:
        self.expected_missed |= slo.get("expected") == "missed"
        if "targets_met" in slo:
            self.verdict = json_verdict_line(slo, timings)


def _choices(data: bytes) -> list[dict[str, Any]]:
    event = json.loads(data)
    if "error" in event:
        error = event["error"]
        raise ServerError(str(error.get("code") or error["type"]), error["message"])
    choices: list[dict[str, Any]] = event["choices"]
    return choices


def _help(command: str) -> None:
    if command != HELP:
        print(f"{command} is not a command.", file=sys.stderr)
    for name, does in COMMANDS.items():
        print(f"{name:<8}{does}", file=sys.stderr)


def _say(chat: Chat, message: str) -> None:
    reported = False
    for piece in chat.answers(message):
        print(piece, end="", flush=True)
        if chat.expected_missed and not reported:
            print(f"\n{EXPECTED_MISSED}", file=sys.stderr)
            reported = True
    print(flush=True)
    if chat.verdict is not None:
        print(chat.verdict, file=sys.stderr)


def _read() -> str | None:
    """A line of the user; None at the end. Prints a prompt only if stdin is a terminal."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "seed")
    options = {name: getattr(args, name) for name in (*names, "slo_class")}
    options["slo"] = _targets(args) or None
    return {name: value for name, value in options.items() if value is not None}


def _targets(args: argparse.Namespace) -> dict[str, float]:
    targets = {name: getattr(args, name) for name in ("ttft_ms", "tbt_ms")}
    return {name: value for name, value in targets.items() if value is not None}


def _parser() -> Parser:
    parser = Parser(
        prog="jaxserve chat",
        description="Talks with the model of a jaxserve server, a line of input at a time.",
    )
    add = parser.add_argument
    add("message", nargs="?", help="one message, whose answer is all; else they come from stdin")
    add(
        "--address",
        default=DEFAULT_HTTP_ADDRESS,
        help="host:port of the server's HTTP (%(default)s)",
    )
    add("--system", metavar="TEXT", help="what the model is told before the first message")
    add("--max_tokens", type=int, help="at most that many tokens an answer (all there is room for)")
    add("--temperature", type=float, help="0 is greedy (default: the server's)")
    add("--top_p", type=float, help="1 is off (default: the server's)")
    add("--seed", type=int, help="same seed, same text")
    add("--ttft_ms", type=float, help="target: to an answer's first token")
    add("--tbt_ms", type=float, help="target: between two tokens, the 99th percentile")
    add("--slo_class", help="one of the server's, for targets that are not given here")
    add_access_flags(parser)
    return parser
