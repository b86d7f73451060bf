"""Lists the scheduling policies: what they do, their source, and whether a server accepts them.

    jaxserve policies
    jaxserve policies edf
    jaxserve policies --json

Parameters are shown with their defaults; `--policy=sarathi:watermark=0.05` sets one. With the name
of a policy, they are explained.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from jaxserve.command_line import Parser
from jaxserve.sched.parameters import parameters, text_of
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import PolicyEntry, policies, variants


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0, 2 for a wrong command line."""
    parser = Parser(prog="jaxserve policies", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("name", nargs="?", default="", help="explain this policy")
    args = parser.parse_args(argv)
    known = policies()
    if args.name and args.name not in known:
        parser.error(f"there is no policy {args.name!r}; known: {', '.join(known)}")
    listed = listing(args.name)
    if args.json:
        print(json.dumps(listed))
        return 0
    print(text(listed))
    if args.name:
        print(f"\n{explained(known[args.name].make())}")
    return 0


def explained(policy: Policy) -> str:
    """The docstrings of the policy's classes, its own first."""
    mro = type(policy).__mro__
    docs = [cls.__doc__ for cls in mro[: mro.index(Policy)] if cls.__doc__]
    return "\n\n".join(map(inspect.cleandoc, docs))


def listing(name: str = "") -> dict[str, list[dict[str, Any]]]:
    """policies: name, summary, source, deployable, parameters (default by name, as text). variants:
    suffix, summary, source. name: lists only this policy; "" for all."""
    known = policies()
    return {
        "policies": [_entry(policy) for policy in ([known[name]] if name else known.values())],
        "variants": [
            {"suffix": v.suffix, "summary": v.summary, "source": v.source}
            for v in variants().values()
        ],
    }


def _entry(policy: PolicyEntry) -> dict[str, Any]:
    known = parameters(policy.make())
    return {
        "name": policy.name,
        "summary": policy.summary,
        "source": policy.source,
        "deployable": policy.deployable,
        "parameters": {name: text_of(one.default) for name, one in known.items()},
    }


def text(found: dict[str, list[dict[str, Any]]]) -> str:
    """`listing` as text for people."""
    width = max(len(p["name"]) for p in found["policies"])
    lines = []
    for policy in found["policies"]:
        where = "server and simulator" if policy["deployable"] else "simulator only"
        lines.append(f"{policy['name']:<{width}}  {policy['summary']}")
        lines.append(f"{'':<{width}}  [{policy['source']}; {where}]")
        known = " ".join(f"{name}={default}" for name, default in policy["parameters"].items())
        if known:
            lines.append(f"{'':<{width}}  {known}")
    lines.append("")
    for variant in found["variants"]:
        lines.append(f"NAME+{variant['suffix']}: {variant['summary']}")
        lines.append(f"  [{variant['source']}]")
    return "\n".join(lines)
