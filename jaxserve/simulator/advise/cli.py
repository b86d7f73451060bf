r"""Says which policy to serve with: all that a server takes, simulated on your traffic, ranked.

    jaxserve advise --replay=served.jsonl
    jaxserve advise --replay=served.jsonl --slo_ttft_ms=300 --slo_tbt_ms=80
    jaxserve advise --system=mine.json --workload=sharegpt --rate=8 \
        --slo_ttft_ms=1000 --slo_tbt_ms=100
    jaxserve advise --system=llama-2-7b@a100 --workload=sharegpt --rate=8 \
        --classes=chat:0.7:ttft=500ms:tbt=50ms,batch:0.3:tier=best_effort:jct=60s --json

--replay=FILE simulates the traffic that a server with --config.engine.record=FILE has served, on a
system fitted to its steps. Otherwise --workload gives the traffic, and --system the system: a
profile of this machine, which `jaxserve profile --out=mine.json` writes, or MODEL@DEVICE. The flags
are those of `jaxserve simulate`, whose help explains them.

First every policy is simulated with one seed; the best few then with more, in the end with --seeds,
and with 0.8 and 1.25 times the traffic, with one seed. Policies are ranked by the share of the
requests that attain their SLO by a server's verdict (the longest time between two tokens counts),
then by goodput. Two policies differ if that share, or the goodput, differs by more than its 95%
interval and by more than half a point, or 1%. The intervals are of the difference seed by seed, or
for a single run over its requests. Among the policies that do not differ from the best, the
plainest is recommended, first of all the server's default.

Exit codes: 0, 1 if a run fails, 2 if nothing can be simulated with the command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxserve.command_line import Parser, print_result, run_reporting
from jaxserve.sched.registry import deployable, make_policy
from jaxserve.simulator.advise import text
from jaxserve.simulator.advise.rounds import advise
from jaxserve.simulator.simulate import flags, output, replay
from jaxserve.simulator.simulate.runs import REFUSED, check_targets
from jaxserve.simulator.simulate.workers import Workers

# Flags of the simulator's command that advise does not have.
_NOT_ASKED = ("find", "attainment", "views", "plots", *output.FILES)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code, see the module's docstring, or 130 for ^C."""
    parser = flag_parser()
    args = parser.parse_args(argv)
    problem = check(args)
    if problem:
        parser.error(problem)
    return run_reporting("jaxserve advise", lambda: _advise(args), *REFUSED)


def flag_parser() -> Parser:
    """The parser; pass its result to `check`."""
    parser = Parser(prog="jaxserve advise", description=__doc__)
    flags.add_policy(parser, None, "all that a server takes but those for programs")
    flags.add_what_is_simulated(parser, system="needed without --replay")
    flags.add_how_often(parser)
    parser.set_defaults(**dict.fromkeys(_NOT_ASKED))
    return parser


def check(args: argparse.Namespace) -> str:
    """A line about flags that contradict each other, or are missing; "" if there are none."""
    problem = flags.check(args)
    if problem:
        return problem
    if args.rate is not None and len(args.rate) > 1:
        return "--rate is that of the traffic, one; what 0.8 and 1.25 times as much do is said"
    if args.replay is None and args.system is None:
        return (
            "--system is needed without --replay: a profile of this machine (jaxserve "
            "profile --out=mine.json), or MODEL@DEVICE"
        )
    return ""


def _advise(args: argparse.Namespace) -> int:
    if args.policy is None:
        args.policy = deployable(for_programs=False)
    unreal = [name for name in args.policy if make_policy(name).hypothetical]
    if unreal:
        raise ValueError(f"--policy: {unreal[0]} is for simulations only, no server takes it")
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if args.replay:
        recorded = replay.read(args)
        served = recorded.recording.header.policy
        args.policy += [served] if served not in args.policy else []
        runs, notes = recorded.runs(args), ("", *recorded.notes)
        doubts = recorded.doubts(args)
    else:
        runs = flags.runs(args)
    check_targets(runs[0], "nobody has a target that could be missed")
    with Workers(args.jobs) as workers:
        advice = advise(runs, args.seeds, workers)
    print_result(args, "\n".join([*doubts, text.report(advice), *notes]), text.as_json(advice))
    return 0
