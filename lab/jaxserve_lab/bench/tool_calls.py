"""How much later the first token of a chat comes if it may call tools.

    jaxserve bench tools --config=base --model=smollm2
    jaxserve bench tools --tools=100 --repeats=30 --json

Streams one chat at a time over HTTP from one server, in turns: without tools; without tools, but
with a prompt of as many tokens; with --tools tools, which the model may call; with the same tools,
but strict; and with a required tool. In each turn a chat first has a prompt that is not in the
prefix cache, then the same prompt five times, of which the fastest counts. The result is the median
over turns of the ratio to the chat without tools in the same turn. Grammars are compiled before.
Flags of serve.py work too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.bench.command import BenchParser
from jaxserve.bench.load_target import BenchError
from jaxserve.command_line import print_result
from jaxserve.machine import machine, versions
from jaxserve.simulator.group_table import aligned
from jaxserve_lab.bench.interleaved import in_turns

PLAIN, AS_LONG = "no tools", "no tools, as long"
FRESH, CACHED = "fresh", "cached"
ASK = {"role": "user", "content": "What is the weather in Rome?"}
_PATIENCE_S, _AGAIN = 600.0, 5
Turns = Mapping[str, Mapping[str, Sequence[float]]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the engine's config; argparse exits for --help.
    Raises UsageError or ConfigError."""
    parser = BenchParser("tools", description=__doc__)
    parser.number("tools", 20, "tools of a chat")
    parser.number("repeats", 15, "turns")
    return parser.parse_serving(argv)[0]


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code. Raises ConfigError and BenchError."""
    where, (tokens, turns) = machine(), run(args)
    result = {"command": "tools", "prompt_tokens": tokens, "ttft_ms": turns, "later": later(turns)}
    print_result(args, text(tokens, turns), {**result, "machine": where, "versions": versions()})
    return 0


def run(args: argparse.Namespace) -> tuple[dict[str, int], dict[str, dict[str, list[float]]]]:
    """Tokens of each kind of chat, and its times to the first token in ms, FRESH and CACHED."""
    from jaxserve.engine.startup.build import build_engine  # imported late: jax takes seconds
    from jaxserve.server.http.options import http_settings
    from jaxserve.server.server import Server
    from jaxserve.server.startup.launch import find_checkpoint

    config = find_checkpoint(args.config.with_fields(server__http_port=0))
    engine = build_engine(config, progress=sys.stderr.isatty())
    engine.start()
    with Server(engine, grace_s=0.0, http=http_settings(config)) as server:
        assert server.http_address is not None
        return measured(server.http_address, args.tools, args.repeats)


def measured(
    address: str, count: int, repeats: int
) -> tuple[dict[str, int], dict[str, dict[str, list[float]]]]:
    """The same for the server at this address, with this many tools and turns."""
    connection = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
    chats = kinds(count, lambda body: _tokens(connection, body))
    tokens = {name: _tokens(connection, body) for name, body in chats.items()}
    times: dict[str, dict[str, list[float]]] = {name: {FRESH: [], CACHED: []} for name in chats}
    for turn, name in in_turns(list(chats), 1 + repeats):  # turn 0 warms up
        salt = f"{name} {turn}"
        body = {**chats[name], "cache_salt": salt}
        fresh, *again = (_ttft_ms(connection, body) for _ in range(1 + _AGAIN))
        if turn:
            times[name][FRESH].append(fresh)
            times[name][CACHED].append(min(again))
    connection.close()
    return tokens, times


def kinds(count: int, tokens: Callable[[Mapping[str, Any]], int]) -> dict[str, dict[str, Any]]:
    """Bodies of the chats. tokens: counts a body's prompt tokens."""
    plain, free = {"messages": [ASK]}, {"messages": [ASK], "tools": some_tools(count)}
    strict = {**free, "tools": some_tools(count, strict=True)}
    about, wanted = json.dumps(free["tools"]), tokens(free)
    least, most = 0, len(about)  # characters for a prompt of as many tokens

    def as_long(length: int) -> dict[str, Any]:
        return {"messages": [{"role": "system", "content": about[:length]}, ASK]}

    while tokens(as_long(most)) < wanted:
        about, most = 2 * about, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if tokens(as_long(middle)) <= wanted else (least, middle)
    return {
        PLAIN: plain,
        AS_LONG: as_long(least),
        f"{count} tools": free,
        f"{count} strict tools": strict,
        f"one of {count} required": {**strict, "tool_choice": "required"},
    }


def some_tools(count: int, *, strict: bool = False) -> list[dict[str, Any]]:
    """Tools with a few parameters each."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Name of the city."},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit", "days"],
        "additionalProperties": False,
    }
    return [
        {
            "type": "function",
            "function": {
                "name": f"get_weather_{place}",
                "description": f"The weather of the next days by service {place}.",
                "parameters": schema,
                "strict": strict,
            },
        }
        for place in range(count)
    ]


def _tokens(connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> int:
    """Tokens of the body's prompt."""
    asked = {name: body[name] for name in ("messages", "tools") if name in body}
    return int(json.loads(_posted(connection, "/tokenize", asked).read())["count"])


def _ttft_ms(connection: http.client.HTTPConnection, body: Mapping[str, Any]) -> float:
    asked = {
        **body,
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    begin, first = time.perf_counter(), None
    answer = _posted(connection, "/v1/chat/completions", asked)
    while line := answer.readline():
        data = line.strip().removeprefix(b"data: ")
        if first is None and data and data != b"[DONE]":
            usage = json.loads(data).get("usage") or {}
            first = time.perf_counter() if usage.get("completion_tokens") else None
    if first is None:
        raise BenchError("a chat had no token")
    return 1e3 * (first - begin)


def _posted(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        raise BenchError(f"{path}: {answer.read().decode()}")
    return answer


def later(turns: Turns) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of chat with tools, and FRESH or CACHED: how much later the first token comes than
    with PLAIN and with AS_LONG, as a share of their times."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name in [name for name in turns if name not in (PLAIN, AS_LONG)]:
        result[name] = {}
        for kind, times in turns[name].items():
            result[name][kind] = {
                other: statistics.median(
                    own / beside for own, beside in zip(times, turns[other][kind], strict=True)
                )
                - 1
                for other in (PLAIN, AS_LONG)
            }
    return result


def text(tokens: Mapping[str, int], turns: Turns) -> str:
    """The table."""
    more = later(turns)
    head = ("", "prompt tokens", *(f"{kind}, ms" for kind in (FRESH, CACHED)))
    beside = [f"{kind}, to {other}" for kind in (FRESH, CACHED) for other in (PLAIN, AS_LONG)]
    lines = [(*head, *beside)]
    for name, kinds in turns.items():
        medians = (f"{statistics.median(kinds[kind]):.1f}" for kind in (FRESH, CACHED))
        shares = [
            f"{share:+.1%}" for kind in more.get(name, {}).values() for share in kind.values()
        ]
        lines.append((name, f"{tokens[name]:,}", *medians, *(shares or [""] * len(beside))))
    return aligned(lines)
