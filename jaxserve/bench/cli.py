"""Measures the engine. Prints a summary for people, and with --json one JSON object as last line.

    jaxserve bench throughput --config=opt_125m_cpu --num_requests=32
    jaxserve bench latency --input_len=128 --output_len=64
    jaxserve bench load --rate=2 --num_requests=100 --slo_ttft_ms=500 --slo_tbt_ms=100
    jaxserve bench load --rate=2 --lengths=lengths.csv --address=localhost:50051
    jaxserve bench load --rate=2 --classes=chat:0.7:ttft=500ms,batch:0.3:jct=60s
    jaxserve bench load --lengths=closed-agent --programs=24 --scale=16

The engine runs in this process, with the presets and flags of serve.py (--config, --model,
--load_format, --policy, --config.x.y=); `load --address` goes to a running server instead. Prompts
are random token ids, and the end-of-sequence token is ignored. Calls of programs (--programs)
are sent once those that they wait for have ended, and go on with the model's answers.

The others come with the extra lab:

    jaxserve bench plan
    jaxserve bench context
    jaxserve bench fidelity --config=tiny_cpu,opt_125m_cpu
    jaxserve bench twin --url=http://localhost:8000 --fit=1,3 --predict=0.5,2,4
    jaxserve bench mixed --rate=16
    jaxserve bench slo --load=0.5
    jaxserve bench programs
    jaxserve bench abuse
    jaxserve bench soak --minutes=2
    jaxserve bench fronts
    jaxserve bench tools
    jaxserve bench kernels
    jaxserve bench matmuls
    jaxserve bench adapters
    jaxserve bench gpu
    jaxserve bench league
    jaxserve bench program-league

`plan` and `simulate` have no engine, `context` has no device, `abuse` and `soak` start servers of
their own. `jaxserve bench COMMAND --help` says more of each.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.bench import runs
from jaxserve.bench.command import BenchParser
from jaxserve.bench.load_target import BenchError, EngineTarget, ServerTarget, Target
from jaxserve.bench.report import text
from jaxserve.client import Client, ServerError
from jaxserve.command_line import Parser, print_result
from jaxserve.config import Config, ConfigError
from jaxserve.engine.stats import StepRecorder
from jaxserve.extras import LAB, problem
from jaxserve.machine import machine, versions
from jaxserve.sched.recording import RecordingError
from jaxserve.server.startup.launch import UsageError, find_checkpoint
from jaxserve.simulator import workload_flags
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.workload import WorkloadError

INPUT_LEN, OUTPUT_LEN = 128, 64
MEASURED = {
    "throughput": ("tokens/s with all requests submitted at once", 32),
    "latency": ("one request at a time", 5),
    "load": ("requests that arrive at a rate, whatever becomes of them, or programs", None),
}
"""Commands that measure one engine or server: what they do, and how many requests by default."""
Measure = Callable[[Target], dict[str, Any]]

LAB_COMMANDS = {
    "plan": ("bench.planning_time", "host time of each policy's plan, without an engine"),
    "context": ("bench.context", "host time of a step by the length of contexts, without a device"),
    "simulate": ("bench.simulation_speed", "how long it takes to simulate an hour of traffic"),
    "mixed": ("bench.mixed", "real-time requests over a best-effort batch, by policy"),
    "slo": ("bench.slo", "requests of several SLO classes, by policy"),
    "programs": ("bench.programs", "programs whose calls wait for each other, by policy"),
    "abuse": ("bench.stress.abuse", "hostile and clumsy clients against a server of its own"),
    "soak": ("bench.stress.soak", "everything at once for a while, and what is left of it"),
    "fronts": ("bench.frontends", "what gRPC and HTTP cost, beside the engine alone"),
    "tools": ("bench.tool_calls", "what it costs a chat that it may call tools"),
    "fidelity": ("bench.fidelity", "how well the simulator predicts this engine"),
    "twin": ("bench.twin", "how well a twin predicts a server at other rates"),
    "kernels": ("bench.kernels.kernels", "the kernels against the device's copy and matmul rates"),
    "matmuls": ("bench.kernels.matmuls", "matmuls of a CPU: our kernels against XLA"),
    "adapters": ("bench.kernels.adapters", "what adapters (LoRA) cost a decode step"),
    "gpu": ("bench.kernels.gpu", "everything on a GPU: checks, kernels, OPT-13B end to end"),
    "league": ("experiments.league.cli", "all policies on all workloads: docs/league.md"),
    "program-league": ("experiments.programs.cli", "policies on programs: docs/programs.md"),
}
"""Commands of the lab: the module in it, which has a parse(argv) and a show(args) and is imported
when it is named, and what they do."""
WRONG = (UsageError, ConfigError, WorkloadError)  # command lines


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 1 if it cannot be measured, 2 for a wrong command line."""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        if args.command in LAB_COMMANDS:
            return int(_lab_command(args.command).show(args))
        result = measure(args)
    except (*WRONG, BenchError, ServerError, RecordingError) as error:
        print(f"jaxserve bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, WRONG) else 1
    except KeyboardInterrupt:
        return 130
    print_result(args, text(result), result)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The checked arguments, with the engine's `config`, or None for a server's load. Raises
    UsageError, ConfigError, or BenchError for a command of the lab if that is not installed;
    argparse exits by itself for --help and its own errors."""
    name, given = (argv[0], argv[1:]) if argv else ("", ())
    args: argparse.Namespace
    if name in LAB_COMMANDS:
        args = _lab_command(name).parse(given)
        return args
    if name not in MEASURED:
        _overview().parse_args(argv)  # for its help or its error
    parser = _parser(name)
    args, rest = parser.parse_known_args(given)
    parser.check(args)
    if name == "load":
        _check_load(args, rest)
    served = name == "load" and args.address
    args.config = None if served else parser.read_config(rest)
    return args


def _lab_command(name: str) -> Any:
    """The module of a command of LAB_COMMANDS. Raises BenchError if the lab is not installed."""
    try:
        return importlib.import_module(f"{LAB}.{LAB_COMMANDS[name][0]}")
    except ModuleNotFoundError as error:
        if (said := problem(name, error)) is None:
            raise
        raise BenchError(said) from None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one command. Returns the JSON object. Raises ConfigError, WorkloadError, BenchError."""
    where, config = machine(), args.config
    workload, run = _prepare(args)
    if config is None:
        with Client(args.address) as client:
            target = ServerTarget(client)
            model = target.info()
            runs.warm_up(target, 1, 1, 2, args.seed)
            outcome: dict[str, Any] = {"results": run(target)}
    else:
        if args.command == "throughput":  # all wait at once, and none may be refused
            queue = max(config.scheduler.max_queue, args.num_requests)
            config = config.with_fields(scheduler__max_queue=queue)
        model, outcome = _in_process(args, config, run)
    return {
        "command": args.command,
        "workload": workload,
        "model": model,
        **outcome,
        "config": None if config is None else config.as_dict(),
        "machine": where,
        "versions": versions(),
    }


def _prepare(args: argparse.Namespace) -> tuple[dict[str, Any], Measure]:
    """The workload as reported, and the measurement to be run on a target."""
    no_part = ("command", "json", "config")
    said = {name: value for name, value in vars(args).items() if name not in no_part}
    count, seed = args.num_requests, args.seed
    if args.command == "throughput":
        return said, lambda target: runs.throughput(
            target, count, args.input_len, args.output_len, args.repeats, seed
        )
    if args.command == "latency":
        return said, lambda target: runs.latency(
            target, count, args.input_len, args.output_len, seed
        )
    workload = _spec(args).make_workload(seed)
    if args.scale is not None:
        workload = workload.scaled(args.scale)
    said["num_requests"] = len(workload)
    said["prompt_tokens"] = int(workload.prompt_len.sum())
    said["output_tokens"] = int(workload.output_len.sum())
    return said, lambda target: runs.load(target, workload, seed)


def _in_process(
    args: argparse.Namespace, config: Config, run: Measure
) -> tuple[dict[str, Any], dict[str, Any]]:
    # Imported late: jax takes seconds, and a wrong command line should answer at once.
    from jaxserve.engine.startup.build import build_engine

    engine = build_engine(find_checkpoint(config), progress=sys.stderr.isatty())
    recorder = StepRecorder()
    engine.add_observer(recorder)
    engine.start()
    try:
        target = EngineTarget(engine)
        if args.command == "load":
            runs.warm_up(target, 1, 1, 2, args.seed)
        else:
            rows = args.num_requests if args.command == "throughput" else 1
            runs.warm_up(target, rows, args.input_len, args.output_len, args.seed)
        recorder.steps = []
        before = engine.stats().preemptions
        results = run(target)
        stats = engine.stats()
        about = {
            "steps": runs.step_metrics(recorder.steps),
            "preemptions": stats.preemptions - before,
            "compiles_after_warmup": stats.compiles_after_warmup,
        }
        return target.info(), {"results": results, "engine": about}
    finally:
        engine.stop()


def _spec(args: argparse.Namespace) -> WorkloadSpec:
    """The workload of `load`."""
    lengths, count = args.lengths, args.num_requests
    if args.programs is not None:
        return WorkloadSpec(
            lengths or "", count, programs=args.programs, **workload_flags.options(args)
        )
    if not lengths:
        shape = f"{args.input_len or INPUT_LEN}x{args.output_len or OUTPUT_LEN}"
        lengths, count = f"fixed:{shape}x{count or 100}", None
    return WorkloadSpec(
        lengths, count, args.arrivals, args.rate, args.cv, **workload_flags.options(args)
    )


def _check_load(args: argparse.Namespace, rest: Sequence[str]) -> None:
    if (args.rate is None) == (args.programs is None):
        raise UsageError("--rate or --programs is needed, and only one of them")
    if args.programs is not None and not args.lengths:
        raise UsageError(
            "--programs needs --lengths of closed sessions, or of a trace with programs"
        )
    if args.programs is not None and args.cv is not None:
        raise UsageError("--programs begin as others end: --cv has no effect")
    if (args.arrivals == "gamma") != (args.cv is not None):
        raise UsageError("--arrivals=gamma needs --cv, and only that does")
    if args.lengths and (args.input_len or args.output_len):
        raise UsageError("--lengths gives both lengths; leave out --input_len and --output_len")
    _spec(args)
    if args.address and rest:
        raise UsageError(f"{rest[0]}: the server at --address has its own configuration")


def _overview() -> Parser:
    """The parser of the bench itself, for its help."""
    parser = Parser(prog="jaxserve bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (does, _) in MEASURED.items():
        commands.add_parser(name, help=does)
    for name, (_, does) in LAB_COMMANDS.items():
        commands.add_parser(name, help=f"{does} (lab)")
    return parser


def _parser(name: str) -> BenchParser:
    does, count = MEASURED[name]
    told = f"{does}. Flags of serve.py work too: --config=, --policy=, ..."
    parser = BenchParser(name, description=told)
    if count is None:
        _load_flags(parser)
    else:
        parser.number("num_requests", count, "requests")
        parser.number("input_len", INPUT_LEN, "prompt tokens")
        parser.number("output_len", OUTPUT_LEN, "output tokens")
    parser.number("seed", 0, "of prompts and arrivals", least=0)
    if name == "throughput":
        parser.number("repeats", 3, "measured runs, after one to warm up")
    return parser


def _load_flags(parser: BenchParser) -> None:
    many = "requests (100, or all rows of a trace, or 1000 of a data set)"
    parser.number("num_requests", None, many)
    parser.number("input_len", None, f"prompt tokens ({INPUT_LEN})")
    parser.number("output_len", None, f"output tokens ({OUTPUT_LEN})")
    parser.number("rate", None, "requests per second", least=None)
    workload_flags.add_programs(parser)
    parser.number("scale", None, "divisor of all lengths, for small models", least=None)
    parser.number("cv", None, "standard deviation of gamma gaps over their mean", least=None)
    kinds, gaps = ("poisson", "gamma"), "gaps between requests (poisson)"
    parser.add_argument("--arrivals", choices=kinds, default="poisson", help=gaps)
    where = (
        "a trace's path, such as a CSV of prompt_tokens,output_tokens, a data set's name, "
        "conversation or agent, or closed-conversation, closed-agent or closed-research"
    )
    parser.add_argument("--lengths", help=f"{where}; arrivals are drawn")
    workload_flags.add_flags(parser, "a number; 'length' (the default), what each request writes")
    parser.set_defaults(max_tokens="length")
    there = "host:port of a running server, instead of an engine here"
    parser.add_argument("--address", help=there)
