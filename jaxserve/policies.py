"""Lists the scheduling policies: what they do, where they come from, and whether a server takes it.

python -m jaxserve.policies
python -m jaxserve.policies --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.sched.registry import policies, variants


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args(argv)
    found = listing()
    print(json.dumps(found) if args.json else text(found))
    return 0


def listing() -> dict[str, list[dict[str, Any]]]:
    """policies: name, summary, source, deployable. variants: suffix, summary, source."""
    return {
        "policies": [
            {"name": p.name, "summary": p.summary, "source": p.source, "deployable": p.deployable}
            for p in policies().values()
        ],
        "variants": [
            {"suffix": v.suffix, "summary": v.summary, "source": v.source}
            for v in variants().values()
        ],
    }


def text(found: dict[str, list[dict[str, Any]]]) -> str:
    width = max(len(p["name"]) for p in found["policies"])
    lines = []
    for policy in found["policies"]:
        where = "server and simulator" if policy["deployable"] else "simulator only"
        lines.append(f"{policy['name']:<{width}}  {policy['summary']}")
        lines.append(f"{'':<{width}}  [{policy['source']}; {where}]")
    lines.append("")
    for variant in found["variants"]:
        lines.append(f"NAME+{variant['suffix']}: {variant['summary']}")
        lines.append(f"  [{variant['source']}]")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
