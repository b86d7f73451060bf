"""The flags for several replicas: their routers and their faults."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial

from jaxserve.command_line import Parser
from jaxserve.sched.routing.moves import parse_link, parse_roles
from jaxserve.sched.routing.routers import ROUTERS
from jaxserve.sched.slo.classes import time_of, values_of
from jaxserve.simulator.settings import Fault, Routing
from jaxserve.simulator.workload_flags import number, parsed, positive_int
from jaxserve.simulator.workloads.workload import WorkloadError

MOST_REPLICAS = 1 << 14  # each has a scheduler
MOST_SECONDS = 1e6
LEAST_SECONDS = 1e-3  # least interval of snapshots, since each is a simulated event
MOST_SLOWDOWN = 1e6
_OF_SEVERAL = {  # the fields of `Routing` by flag
    "routing": "name",
    "routers": "routers",
    "snapshot_s": "interval",
    "snapshot_age_s": "age",
    "snapshot_loss": "loss",
    "faults": "faults",
    "link": "link",
    "roles": "roles",
}
_OF_SNAPSHOTS = ("snapshot_s", "snapshot_age_s", "snapshot_loss")
_FAULT = ("at", "slow", "notice")


def add_flags(parser: Parser) -> None:
    """Adds --replicas, --routing, --routers, --snapshot_s, --snapshot_age_s, --snapshot_loss,
    --faults, --link and --roles."""
    add = parser.add_argument
    add("--replicas", type=partial(positive_int, most=MOST_REPLICAS), default=1, help="(1)")
    add("--routing", choices=tuple(ROUTERS), help="how replicas are chosen (round_robin)")
    add(
        "--routers",
        type=positive_int,
        help="N routers, each with every N-th replica and request (1)",
    )
    add(
        "--snapshot_s",
        type=_interval,
        help="interval of a replica's snapshots (0: always the present state)",
    )
    add("--snapshot_age_s", type=_seconds, help="delay of a snapshot, less than the interval (0)")
    add("--snapshot_loss", type=_number(0.0, 1.0), help="share of the snapshots that is lost (0)")
    add("--faults", type=parsed(_faults), metavar="REPLICA[:at=60s]...", help="see above")
    add("--link", type=parsed(parse_link), metavar="LATENCY:PER_1000", help="see above")
    add("--roles", type=parsed(parse_roles), metavar="PROMPTS:DECODES", help="see above")


def check(args: argparse.Namespace) -> str:
    """A line about flags that contradict each other, or would have no effect; "" if there are
    none."""
    given = [name for name in _OF_SEVERAL if getattr(args, name) is not None]
    if args.replicas == 1:
        return f"--{given[0]} is for more than one of --replicas" if given else ""
    if (args.routers or 1) > args.replicas:
        return f"--routers must be at most --replicas, {args.replicas}, got {args.routers}"
    seen = [name for name in given if name in _OF_SNAPSHOTS]
    if seen and not ROUTERS[args.routing or Routing.name].looks:
        looking = ", ".join(name for name, way in ROUTERS.items() if way.looks)
        return f"--{seen[0]} is for a --routing that looks at snapshots: {looking}"
    if seen and not args.snapshot_s:
        return f"--{seen[0]} is of snapshots that come from time to time: --snapshot_s says when"
    if seen and (args.snapshot_age_s or 0.0) >= args.snapshot_s:
        limit = f"less than --snapshot_s, {args.snapshot_s:g}"
        return f"--snapshot_age_s must be {limit}, got {args.snapshot_age_s:g}"
    if args.link is not None:
        if args.routing != "slo":
            return "--link is for --routing=slo: other routers move no requests"
        if not getattr(args, "host_tokens", 0):
            return (
                "--link moves caches from host memory to host memory: --host_tokens says how much"
            )
    if args.roles is not None:
        prompts, decodes = args.roles
        if args.link is None:
            return "--roles is for replicas between which requests move: --link says how fast"
        if prompts + decodes != args.replicas:
            return f"--roles must be --replicas together, {args.replicas}, got {prompts}:{decodes}"
        if min(args.roles) < (args.routers or 1):
            return f"--roles: each of {args.routers} --routers needs both, got {prompts}:{decodes}"
    for fault in args.faults or ():
        if fault.replica >= args.replicas:
            last = f"the last of --replicas is {args.replicas - 1}"
            return f"--faults: there is no replica {fault.replica}, {last}"
    return ""


def routing(args: argparse.Namespace) -> Routing:
    """The routing described by the flags, which have been checked."""
    given = {field: getattr(args, flag) for flag, field in _OF_SEVERAL.items()}
    return Routing(**{field: value for field, value in given.items() if value is not None})


def _interval(text: str) -> float:
    value = _seconds(text)
    if 0 < value < LEAST_SECONDS:
        limits = f"must be 0, or at least {LEAST_SECONDS:g}"
        raise argparse.ArgumentTypeError(f"{limits}, got {text!r:.40}")
    return value


def _number(low: float, high: float) -> Callable[[str], float]:
    return number(f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


_seconds = _number(0.0, MOST_SECONDS)
_slowdown = _number(1.0, MOST_SLOWDOWN)


def _faults(text: str) -> tuple[Fault, ...]:
    found = tuple(_fault(part) for part in text.split(","))
    replicas = [fault.replica for fault in found]
    for replica in replicas:
        if replicas.count(replica) > 1:
            raise WorkloadError(f"replica {replica} is given twice")
    return found


def _fault(part: str) -> Fault:
    """`REPLICA`, then any of `at=` and `notice=`, times, and `slow=`, a number."""
    replica, *rest = part.split(":")
    if not (replica.isascii() and replica.isdigit() and int(replica[:10]) < MOST_REPLICAS):
        most = MOST_REPLICAS - 1
        raise WorkloadError(f"a fault begins with a replica, 0 to {most}, got {part!r:.40}")
    where = f"replica {replica}"
    values = values_of(where, rest, _FAULT)
    slowdown = math.inf
    if "slow" in values:
        if "notice" in values:
            raise WorkloadError(f"{where}: notice= is of one that dies, slow= of one that does not")
        try:
            slowdown = _slowdown(values["slow"])
        except argparse.ArgumentTypeError as error:
            raise WorkloadError(f"{where}: slow {error}") from None
    times = {
        key: time_of(f"{where}: {key}", values[key]) for key in ("at", "notice") if key in values
    }
    return Fault(int(replica), times.get("at", 0.0), slowdown, times.get("notice", 1.0))
