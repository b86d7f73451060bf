"""A result as text for people. Programs read the JSON line."""

from __future__ import annotations

from typing import Any

from jaxserve.bench.command import on_machine, served_by
from jaxserve.simulator.group_table import group_lines

LABELS = {
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "prompt + output tokens/s",
    "seconds": "seconds",
    "duration_s": "duration, s",
    "finished_per_s": "finished requests/s",
    "offered_per_s": "offered requests/s",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "tbt_ms": "TBT, ms",
    "request_p99_tbt_ms": "P99 TBT of a request, ms",
    "normalised_latency_ms": "normalised latency, ms/token",
    "e2e_ms": "end to end, ms",
    "sent_late_ms": "sent late by, ms",
    "preemptions": "preemptions",
}
_WIDTH = 30


def text(result: dict[str, Any]) -> str:
    """About twenty lines: what was measured, where, and the results."""
    used = result["versions"]
    lines = [
        f"{result['command']}: {served_by(result)}, policy {result['model']['policy']}",
        f"{on_machine(result)}; jax {used['jax']}, Python {used['python']}",
    ]
    lines += [_line(LABELS[name], value) for name, value in _known(result["results"])]
    requests = result["results"].get("requests")
    if requests:
        counts = ", ".join(f"{count} {name}" for name, count in requests.items() if count)
        lines.append(_line("requests", counts))
    lines += _slo(result["results"].get("slo"))
    lines += _programs(result["results"].get("programs"))
    if "tiers" in result["results"]:
        lines += [f"  {line}" for line in group_lines(result["results"])]
    engine = result.get("engine")
    if engine:
        lines += _engine(engine)
    return "\n".join(lines)


def _known(results: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, results[name]) for name in LABELS if results.get(name) is not None]


def _slo(slo: dict[str, Any] | None) -> list[str]:
    if slo is None:
        return []
    shares = ", ".join(
        f"{_percent(slo[name])}{label}"
        for name, label in (
            ("attainment", ""),
            ("ttft_attainment", " of TTFT"),
            ("tbt_attainment", " of TBT"),
            ("jct_attainment", " of JCT"),
            ("max_tbt_attainment", " of the longest gap"),
        )
    )
    lines = [_line("SLO attainment", shares)]
    if slo["goodput_per_s"] is not None:
        lines.append(_line("goodput, requests/s", slo["goodput_per_s"]))
    return lines


def _programs(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    counts = ", ".join(f"{found[n]} {n.replace('_', ' ')}" for n in ("finished", "given_up"))
    lines = [_line("programs", f"{found['begun']} begun, {counts}; {found['calls']} calls")]
    if found["makespan_s"] is not None:
        lines.append(_line("makespan of a program, s", found["makespan_s"]))
        tools, people = found["tool_time_s"], found["think_time_s"]
        lines.append(_line("  of it for tools, for people", f"{tools:.2f}, {people:.2f}"))
    if found["attainment"] is not None:
        lines.append(_line("programs in time", _percent(found["attainment"])))
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _engine(engine: dict[str, Any]) -> list[str]:
    steps = engine["steps"]
    fullest = steps["fullest_decode"]
    lines = []
    for name, group in (("all steps", steps["all"]), (f"{fullest['rows']}-row decodes", fullest)):
        if group["count"]:
            lines.append(_line(f"{name}, ms ({group['count']})", group["step_ms"]))
            lines.append(_line("  host work in it, ms", group["host_ms"]))
    lines.append(_line("preemptions", engine["preemptions"]))
    lines.append(_line("compiles after warm-up", engine["compiles_after_warmup"]))
    return lines


def _line(label: str, value: Any) -> str:
    return f"  {label:<{_WIDTH}} {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict) and "median" in value:
        low, high = min(value["values"]), max(value["values"])
        return f"{value['median']:.2f} (median of {len(value['values'])}: {low:.2f} to {high:.2f})"
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.2f}" for name, number in value.items())
    return str(value)
