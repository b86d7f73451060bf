"""Expressions of PromQL, beside what a server exports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql

Exported = dict[str, list[dict[str, str]]]
OF_PROMETHEUS = {"instance", "job"}  # labels that it gives to what it scrapes


def parsed(expression: str) -> Any:
    """With Grafana's own variables as it fills them in."""
    filled = expression.replace("$__rate_interval", "1m")
    return promql.parse(re.sub(r"\$\w+", ".*", filled))


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if hasattr(node, name):
            yield from nodes(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from nodes(argument)


def selects(matcher: Any, value: str) -> bool:
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        same = value == matcher.value
    else:
        same = re.fullmatch(matcher.value, value) is not None
    return same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def complaints(expression: str, legend: str, exported: Exported) -> list[str]:
    """What of an expression the server does not export."""
    found, labels = [], set[str]()
    everything = list(nodes(parsed(expression)))
    for node in everything:
        if not isinstance(node, promql.VectorSelector):
            continue
        samples = exported.get(node.name, [])
        labels |= {name for sample in samples for name in sample} | OF_PROMETHEUS
        asked = [m for m in node.matchers.matchers if m.name not in OF_PROMETHEUS]
        if not samples:
            found.append(f"there is no {node.name}")
        elif not any(all(selects(m, s.get(m.name, "")) for m in asked) for s in samples):
            found.append(f"nothing is {node.prettify()}")
        names = {name for sample in samples for name in sample} | OF_PROMETHEUS
        found += [f"{node.name} has no {m.name}" for m in asked if m.name not in names]
    grouped = [set(n.modifier.labels) for n in everything if isinstance(n, promql.AggregateExpr)]
    shown = set(re.findall(r"{{(\w+)}}", legend))
    for kept in grouped:
        found += [f"no {name} to group by" for name in kept - labels]
        found += [f"{name} of the legend is summed up" for name in shown - kept]
    return found + [f"no {name} for the legend" for name in shown - labels]
