"""The flags of the command, their consistency, and the runs that they describe."""

from __future__ import annotations

import argparse
import os
from typing import Any

from jaxserve.command_line import Parser
from jaxserve.config import SchedulerConfig
from jaxserve.sched.cache.cache_kinds import HIDDEN_READS
from jaxserve.sched.cache.retention import LRU
from jaxserve.sched.registry import make_policy
from jaxserve.simulator import simulator, workload_flags
from jaxserve.simulator.simulate import output, routing_flags
from jaxserve.simulator.simulate.runs import Recorded, Run, Source
from jaxserve.simulator.workload_flags import number, parsed, positive_int, seconds
from jaxserve.simulator.workloads.closed_loop import parse_closed_loop
from jaxserve.simulator.workloads.guessable import Chances
from jaxserve.simulator.workloads.specs import ARRIVALS, WorkloadSpec

SYSTEM = "llama-2-7b@a100"
SEEDS = 5
ATTAINMENT = 0.9
FIRST_RATE = 1.0  # of a search, requests/s
RATES = (1e-6, 1e9)  # requests/s
MAX_SEED = 2**31 - 1
NOT_REPLAYED = (  # with --replay, which has these settings
    "workload",
    "num_requests",
    "arrivals",
    "cv",
    "on_s",
    "off_s",
    "duration",
    "best_effort",
    "programs",
    "program_deadline_ms",
    "classes",
    "max_tokens",
    "guessable",
    "adapters",
    "find",
)
MAX_ADAPTERS = 1 << 20
_OF_A_RUN = (  # fields of `Run`
    *("rules", "kv_tokens", "host_tokens", "block_size", "max_batch_tokens", "max_prefill_tokens"),
    *("max_rows", "replicas", "seed", "hidden_read", "max_queue", "refuse_late"),
    *("retention", "drop_too_long"),
)
NOT_FOUND = (
    "requests_table",
    "batches_table",
    "programs_table",
    "chrome_trace",
    "plots",
)  # not with --find


def parser(description: str, epilog: str = "") -> Parser:
    """The parser; pass its result to `check`. description, epilog: before and after the flags."""
    parser = Parser(prog="jaxserve simulate", description=description, epilog=epilog)
    add_policy(parser, [SchedulerConfig.policy], SchedulerConfig.policy)
    add_what_is_simulated(parser)
    add_how_often(parser)
    _add_what_is_asked(parser)
    return parser


def check(args: argparse.Namespace) -> str:
    """A line about flags that contradict each other, or would have no effect; "" if there are
    none."""
    if args.replay is None and args.workload is None:
        return "--workload or --replay is needed"
    if args.replay is not None:
        for name in NOT_REPLAYED:
            if getattr(args, name) is not None:
                return f"--{name} does not go with --replay: the recording has requests of its own"
        if args.hidden_read != "auto" and args.system is None:
            return (
                "--hidden_read is of --system=MODEL@DEVICE, the recording has a system of its own"
            )
        if args.rules != "jaxserve":
            return "--replay is of an engine: --rules are its own"
    if args.find is not None:
        if args.rate is not None and len(args.rate) > 1:
            return "--find=capacity begins its search at one --rate, got several"
        for name in NOT_FOUND:
            if getattr(args, name) is not None:
                return f"--{name} is of single runs, --find=capacity of many; try --summary"
        if args.arrivals == "all":
            return "--find=capacity varies the rate, and --arrivals=all has none"
        if args.programs is not None:
            return "--find=capacity varies the rate, and --programs begin as others end"
        if args.best_effort is not None:
            return "--best_effort requests have no SLO that --find=capacity could look at"
    elif args.attainment is not None:
        return "--attainment is for --find=capacity"
    if args.best_effort is not None and args.duration is None:
        return "--best_effort requests come again and again: --duration is needed"
    if args.best_effort is not None and args.max_queue is not None:
        return "--best_effort requests would find the queue full: --max_queue does not go with them"
    if args.views is not None and args.plots is None:
        return "--views says which figures; --plots says where they go"
    if (args.seed or 0) + args.seeds - 1 > MAX_SEED:
        return f"--seed and those after it must be at most {MAX_SEED}"
    return routing_flags.check(args)


def beside_rules(args: argparse.Namespace) -> str:
    """A line about flags that override a paper's rules; "" if there are none."""
    rules = simulator.RULES[args.rules]
    found = []
    if args.block_size not in (None, rules.block_size):
        found.append(f"--block_size={args.block_size}")
    if args.prefix_caching and not rules.prefix_caching:
        found.append("--prefix_caching")
    if args.rules == "jaxserve" or not found:
        return ""
    return f"rules {args.rules}, but for {' and '.join(found)}"


def add_policy(parser: Parser, default: list[str] | None, named: str) -> None:
    """Adds --policy. named: the default, for the help."""
    parser.add_argument(
        "--policy",
        type=_names,
        default=default,
        help=f"names, separated by commas, with parameters: edf:watermark=0.05 ({named})",
    )


def add_what_is_simulated(parser: Parser, system: str = SYSTEM) -> None:
    """Adds the flags of the system and of the workload. system: the default, for the help."""
    add = parser.add_argument
    add("--system", type=path, help=f"preset, MODEL@DEVICE or profile.json ({system})")
    add(
        "--hidden_read",
        choices=("auto", *HIDDEN_READS),
        default="auto",
        help="how MODEL@DEVICE reads hidden caches (auto)",
    )
    add("--workload", help="see above")
    add("--replay", type=path, metavar="PATH", help="a recording, instead of --workload")
    add(
        "--num_requests",
        type=positive_int,
        help="requests drawn (1000), or the first of a trace",
    )
    add(
        "--arrivals",
        choices=ARRIVALS,
        help="how requests arrive (as in the trace; else poisson with --rate, else all)",
    )
    add("--rate", type=rates, help="requests/s, several separated by commas")
    add("--cv", type=float, help="gamma arrivals: deviation of the gaps over their mean")
    add("--on_s", type=float, help="on_off arrivals: mean seconds on")
    add("--off_s", type=float, help="on_off arrivals: mean seconds off")
    add(
        "--duration",
        type=seconds,
        help="seconds after which the run is cut off; later requests are left out",
    )
    add(
        "--best_effort",
        type=parsed(parse_closed_loop),
        metavar="closed:...",
        help="beside the workload: closed:batch=N,input=uniform:LOW:HIGH,output=uniform:LOW:HIGH; "
        "see above",
    )
    workload_flags.add_programs(parser)
    add(
        "--guessable",
        type=_chances,
        metavar="SHARE:RIGHT",
        help="drafts of +spec: share of the tokens with a guess, and share of right guesses "
        "(0.5:0.62 for conversation, closed-research and humaneval, 0.55:0.8 for agent, otherwise "
        "0:0)",
    )
    add(
        "--adapters",
        type=_adapters,
        metavar="SHARE:COUNT",
        help="share of the requests with an adapter, and number of adapters (none)",
    )
    add("--rules", choices=tuple(simulator.RULES), default="jaxserve", help="whose accounting")
    add("--kv_tokens", type=positive_int, help="M, tokens of KV cache (the system's)")
    add("--host_tokens", type=positive_int, default=0, help="tokens of caches in host memory (0)")
    add("--block_size", type=positive_int, help="tokens of a block (16; infermax_paper: 1)")
    add("--max_batch_tokens", type=positive_int, help="C (the system's)")
    add("--max_prefill_tokens", type=positive_int, help="P (512 where prompts are chunked, else C)")
    add("--max_rows", type=positive_int, help="most requests in a batch (no limit)")
    add(
        "--drop_too_long",
        action="store_true",
        help="leave out requests that the cache cannot hold, and count them (else an error)",
    )
    add("--max_queue", type=int, help="unfinished requests beside max_rows; refuse more (no limit)")
    add(
        "--refuse_late",
        type=number("at least 0", lambda share: share >= 0),
        help="refuse requests expected to wait for more than this share of the TTFT, like the "
        "server (none)",
    )
    add(
        "--prefix_caching",
        action=argparse.BooleanOptionalAction,
        help="reuse cached prefixes, as far as the workload says which tokens are the same "
        "(conversation, agent, closed sessions, traces with hash_ids); by default like a server, "
        "not with infermax_paper, and with --replay as it was served",
    )
    add("--retention", default=LRU, help="which cached prefixes are kept: lru, ttl, worth (lru)")
    routing_flags.add_flags(parser)
    workload_flags.add_flags(
        parser,
        "a number; 'length', what each writes (by default as much as the longest request leaves)",
    )


def add_how_often(parser: Parser) -> None:
    """Adds --seeds, --seed, --jobs and --json."""
    add = parser.add_argument
    add("--seeds", type=positive_int, default=SEEDS, help=f"runs of each ({SEEDS})")
    add("--seed", type=_seed, help="first seed of workloads and policies (0; the recording's)")
    add("--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (all cores)")
    add("--json", action="store_true", help="one JSON object as the last line")


def _add_what_is_asked(parser: Parser) -> None:
    add = parser.add_argument
    add("--find", choices=("capacity",), help="the highest rate that attains the SLO; see above")
    share = number("above 0 and at most 1", lambda share: 0 < share <= 1)
    add(
        "--attainment", type=share, help=f"share of the requests that must attain it ({ATTAINMENT})"
    )
    add("--summary", type=path, metavar="PATH", help="a row per run, and their means, .csv")
    add("--requests_table", type=path, metavar="PATH", help="a row per request, .csv or .json")
    add("--batches_table", type=path, metavar="PATH", help="a row per batch, .csv or .json")
    add("--programs_table", type=path, metavar="PATH", help="a row per program, .csv or .json")
    add("--chrome_trace", type=path, metavar="PATH", help="for chrome://tracing or Perfetto, .json")
    add("--plots", type=path, metavar="DIR", help="figures, as PNG")
    add(
        "--views",
        type=_names,
        help="which figures: attainment,cdf,kv,schedule (the first three; schedule, requests x "
        "batches, is for small runs)",
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    if not all(names):
        raise argparse.ArgumentTypeError(f"a name is missing in {text!r}")
    return _different(names)


def rates(text: str) -> list[float]:
    """A flag's value: rates in requests/s, separated by commas."""
    try:
        found = [float(rate) for rate in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None
    for rate in found:
        if not RATES[0] <= rate <= RATES[1]:
            limits = f"must be from {RATES[0]:g} to {RATES[1]:g}"
            raise argparse.ArgumentTypeError(f"{limits} requests/s, got {rate:g}")
    return _different(found)


def _different(values: list[Any]) -> list[Any]:
    twice = [value for i, value in enumerate(values) if value in values[:i]]
    if twice:
        raise argparse.ArgumentTypeError(f"{twice[0]} is given twice")
    return values


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:11]) <= MAX_SEED):
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SEED}, got {text!r:.40}")
    return int(text)


def _chances(text: str) -> Chances:
    try:
        return Chances.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _adapters(text: str) -> tuple[float, int]:
    share, _, count = text.partition(":")
    try:
        found = float(share), int(count)
    except ValueError:
        found = -1.0, 0
    if not (0 <= found[0] <= 1 and 1 <= found[1] <= MAX_ADAPTERS):
        most = f"a share from 0 to 1 and a number from 1 to {MAX_ADAPTERS}"
        raise argparse.ArgumentTypeError(f"must be SHARE:COUNT, {most}, got {text!r:.40}")
    return found


def path(text: str) -> str:
    """A flag's value: a path, which must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("needs a path")
    return text


def specs(args: argparse.Namespace) -> list[WorkloadSpec]:
    """The workload at each rate."""
    arrivals = ("num_requests", "arrivals", "cv", "on_s", "off_s", "duration")
    named = (*arrivals, "best_effort", "guessable", "adapters", "programs")
    given = {name: getattr(args, name) for name in named} | workload_flags.options(args)
    return [WorkloadSpec(args.workload, rate=rate, **given) for rate in args.rate or [None]]


def runs(args: argparse.Namespace, recorded: Source | None = None) -> list[Run]:
    """A run for each policy and rate, with the first seed; a recording is stretched to the rates.
    Raises before anything runs if any of them is impossible."""
    args.seed = args.seed or 0
    sources: list[Source] = [*specs(args)] if recorded is None else [recorded]
    if isinstance(recorded, Recorded) and args.rate:
        sources = [recorded.at_rate(rate) for rate in args.rate]
    given: dict[str, Any] = {name: getattr(args, name) for name in _OF_A_RUN}
    rules = simulator.RULES[args.rules]
    reuses = args.prefix_caching
    given["prefix_caching"] = rules.prefix_caching if reuses is None else reuses
    given |= {"routing": routing_flags.routing(args), "keep": output.keeps(args)}
    given |= {"system": args.system or SYSTEM, "record_rows": output.records_rows(args)}
    found = [Run(policy, workload=one, **given) for policy in args.policy for one in sources]
    for run in found:
        run.limits()
    if args.max_prefill_tokens and not any(make_policy(name).chunked for name in args.policy):
        raise ValueError("--max_prefill_tokens is for policies that compute prompts in chunks")
    return found
