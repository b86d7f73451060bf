"""The page's section of what was measured on a real cluster, where the numbers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.experiments.common.claims import Section, table

FILE = "scale-live.json"


def on_ray(figures: Path) -> list[Section]:
    """From FILE in the folder of the figures, which `jaxserve.experiments.scale_live` writes;
    nothing without it."""
    if not (figures / FILE).is_file():
        return []
    found = json.loads((figures / FILE).read_text(encoding="utf-8"))
    machine, killed = found["machine"], found["killed"]
    text = (
        f"By `python -m jaxserve.experiments.scale_live --out=docs/figures/{FILE}` on "
        f"{machine['cores']} cores ({machine['cpu']}, load average {machine['load_average']:g} "
        "before it), replicas of the model in the box, OpenAI's client over Ray Serve's proxy "
        "([ray.md](ray.md)). No client asked again by itself."
    )
    rows = [[f"{a} to {b}", *_counts(each)] for a, b, each in _scaled(found)]
    notes = [
        table(["replicas", "seconds", "calls meanwhile", "failed", "with a wrong text"], rows),
        f"One of two replicas was killed under {killed['streams']} streams, once {killed['begun']} "
        f"of them had begun: {killed['whole']} were whole, {killed['cut']} ended with what they "
        f"had and an error, {killed['failed']} failed without any text, {killed['wrong']} had a "
        f"text that is not the one. {killed['recovered']:.1f} s after the last had ended there "
        "were two replicas again. "
        f"The first replica served {found['ready']:.1f} s after the deployment; the median TTFT of "
        f"calls one after the other is {1000 * found['ttft']:.0f} ms.",
    ]
    return [Section("On Ray Serve", text, [], [], notes)]


def _scaled(found: dict[str, Any]) -> list[tuple[int, int, dict[str, Any]]]:
    return [(*each["replicas"], each) for each in (found["up"], found["down"])]


def _counts(each: dict[str, Any]) -> list[str]:
    return [f"{each['seconds']:.1f}", *(f"{each[name]}" for name in ("calls", "failed", "wrong"))]
