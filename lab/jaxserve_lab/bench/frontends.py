"""The cost of frontends: the same work within the engine's process, over gRPC and over HTTP.

    jaxserve bench fronts
    jaxserve bench fronts --config=opt_125m_cpu --repeats=3 --json

One engine serves all three in turns, so that drift of the machine affects all of them. Measured are
the throughput of --streams requests submitted at once, the CPU time of the server's process per
token, and the time to the first token of requests one at a time on an idle engine. A frontend's
clients are a separate process on the same cores. The cost of a frontend is the median over turns of
its figure relative to the engine alone in the same turn. Flags of
serve.py work too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.bench import runs
from jaxserve.bench.command import BenchParser
from jaxserve.bench.load_target import BenchError, EngineTarget
from jaxserve.command_line import print_result
from jaxserve.machine import machine, versions
from jaxserve.simulator.group_table import aligned
from jaxserve_lab.bench.interleaved import in_turns

ALONE, DOORS = "engine alone", ("gRPC", "HTTP")
Measure = Callable[[str, dict[str, Any]], dict[str, Any]]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line, with the engine's config; argparse exits for --help.
    Raises UsageError or ConfigError."""
    parser = BenchParser("fronts", description=__doc__)
    parser.number("streams", 32, "requests at once")
    parser.number("input_len", 128, "prompt tokens")
    parser.number("output_len", 64, "output tokens")
    parser.number("latencies", 5, "requests one at a time in each turn")
    parser.number("repeats", 5, "turns")
    parser.number("seed", 0, "of prompts", least=0)
    return parser.parse_serving(argv)[0]


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code. Raises ConfigError and BenchError."""
    where, turns = machine(), run(args)
    result = {"command": "fronts", "turns": turns, "costs": costs(turns)}
    print_result(args, text(turns), {**result, "machine": where, "versions": versions()})
    return 0


def run(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Each turn's tokens_per_s, cpu_us (per token) and ttft_ms, by frontend."""
    from jaxserve.engine.startup.build import build_engine  # imported late: jax takes seconds
    from jaxserve.server.http.options import http_settings
    from jaxserve.server.server import Server
    from jaxserve.server.startup.launch import find_checkpoint

    queue = max(args.config.scheduler.max_queue, args.streams)
    config = args.config.with_fields(scheduler__max_queue=queue, server__http_port=0)
    engine = build_engine(find_checkpoint(config), progress=sys.stderr.isatty())
    engine.start()
    server = Server(engine, grace_s=0.0, http=http_settings(config))
    target = EngineTarget(engine)

    def alone(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        measure = runs.throughput if name == "throughput" else runs.latency
        return measure(target, **arguments)

    with contextlib.ExitStack() as stack:
        stack.enter_context(server)
        addresses = dict(zip(DOORS, (server.address, server.http_address or ""), strict=True))
        measures: dict[str, Measure] = {ALONE: alone}
        for door in DOORS:
            measures[door] = stack.enter_context(_client(door, addresses[door], target.info()))
        return _turns(args, measures)


def _turns(
    args: argparse.Namespace, measures: Mapping[str, Measure]
) -> dict[str, list[dict[str, float]]]:
    shape = {"input_len": args.input_len, "output_len": args.output_len}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in measures}
    # Turn 0 warms up.
    for turn, name in in_turns(list(measures), 1 + args.repeats):
        seed = {"seed": args.seed + turn}
        offline = {"count": args.streams, "repeats": 1, **shape, **seed}
        spent = time.process_time()
        rate = measures[name]("throughput", offline)["output_tokens_per_s"]["median"]
        spent = time.process_time() - spent
        one_by_one = {"count": args.latencies, **shape, **seed}
        ttft = measures[name]("latency", one_by_one)["ttft_ms"]["median"]
        if turn:
            cpu_us = 1e6 * spent / (args.streams * args.output_len)
            turns[name].append({"tokens_per_s": rate, "cpu_us": cpu_us, "ttft_ms": ttft})
    return turns


@contextlib.contextmanager
def _client(door: str, address: str, served: Mapping[str, Any]) -> Iterator[Measure]:
    """Measures through a frontend, in a separate process."""
    plain = {name: served[name] for name in ("vocab_size", "max_model_len", "pool_tokens", "model")}
    command = [sys.executable, "-m", "jaxserve_lab.bench.frontend_client", door, address]
    with subprocess.Popen(
        [*command, json.dumps(plain)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:

            def measure(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
                assert process.stdin is not None and process.stdout is not None
                print(json.dumps([name, arguments]), file=process.stdin, flush=True)
                answer = process.stdout.readline()
                if not answer:
                    raise BenchError(f"the client of {door} failed")
                return dict(json.loads(answer))

            yield measure
        finally:
            process.kill()


def costs(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """The cost of each frontend, as medians over turns: the lost share of throughput, and the added
    cpu_us and ttft_ms."""
    result = {}
    for door in DOORS:
        pairs = list(zip(turns[ALONE], turns[door], strict=True))
        lost = [1 - through["tokens_per_s"] / own["tokens_per_s"] for own, through in pairs]
        result[door] = {"throughput": statistics.median(lost)}
        for name in ("cpu_us", "ttft_ms"):
            more = (through[name] - own[name] for own, through in pairs)
            result[door][name] = statistics.median(more)
    return result


def text(turns: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """The table."""
    lines = [("", "output tokens/s", "lost", "CPU a token", "more", "TTFT at idle", "more")]
    added = costs(turns)
    for name, rows in turns.items():
        rate, cpu, ttft = (
            statistics.median(turn[key] for turn in rows)
            for key in ("tokens_per_s", "cpu_us", "ttft_ms")
        )
        cost = added.get(name)
        lost, longer, later = ("", "", "")
        if cost is not None:
            lost, longer = f"{cost['throughput']:.1%}", f"{cost['cpu_us']:+.0f} us"
            later = f"{cost['ttft_ms']:+.1f} ms"
        lines.append(
            (name, f"{rate:,.0f}", lost, f"{cpu:,.0f} us", longer, f"{ttft:.1f} ms", later)
        )
    return aligned(lines)
