"""Draws the figures of the documentation as SVG.

    python docs/figures/draw.py [DIR]

Writes beside this file unless a directory is given. No package is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from drawing import BORDER, DEVICE, HOST, OUTSIDE, OWNERS, PAPER, QUIET, Drawing


def request_path() -> Drawing:
    """A request's way through the server and back."""
    d = Drawing(940, 418, "The way of a request: client, gRPC, queue, scheduler, batch, step, text")
    d.rect(176, 14, 750, 232, "#f6f9fc", "#c3d2e0", 10)
    d.note(190, 34, "host")
    d.rect(176, 264, 750, 142, "#fdf6ef", "#e3c9ad", 10)
    d.note(190, 284, "device")

    d.box(14, 48, 128, 70, OUTSIDE, "client", "prompt, sampling,", "SLO, tier")
    d.box(192, 48, 120, 70, HOST, "gRPC server", "checks, encodes")
    d.box(348, 48, 120, 70, HOST, "queue", "bounded")
    d.box(504, 48, 190, 70, HOST, "scheduler", "policy: request ->", "tokens to compute now")
    d.box(730, 48, 180, 70, HOST, "batch", "padded to a bucket,", "block tables")
    d.box(504, 164, 190, 66, HOST, "block accounting", "who holds which block")
    d.box(192, 164, 276, 66, HOST, "detokenise, find stops", "whole characters only")

    d.box(730, 314, 180, 70, DEVICE, "jitted step", "model over the batch")
    d.box(504, 314, 190, 70, DEVICE, "block pool", "K and V of all requests,", "updated in place")
    d.box(192, 314, 276, 70, DEVICE, "sampling", "per request, in one batch")

    for x, other in ((142, 190), (312, 346), (468, 502), (694, 728)):
        d.arrow((x, 83), (other, 83))
    d.arrow((820, 118), (820, 312))
    d.note(828, 212, "launch")
    d.arrow((599, 164), (599, 120))
    d.arrow((728, 338), (696, 338))
    d.arrow((696, 362), (728, 362))
    d.arrow((820, 384), (820, 397), (330, 397), (330, 386))
    d.arrow((330, 314), (330, 232))
    d.note(338, 259, "tokens")
    d.arrow((192, 197), (78, 197), (78, 120))
    d.note(86, 190, "stream")
    d.arrow((440, 314), (440, 294), (760, 294), (760, 312), dashed=True)
    d.note(450, 286, "the next step takes its input here, on the device")
    return d


def block_pool() -> Drawing:
    """Twenty-four blocks and the tables of two requests."""
    d = Drawing(820, 300, "The block pool: blocks of K or V, and the tables of two requests")
    d.text(20, 28, "One pool of blocks on the device", anchor="start", bold=True)
    d.note(
        20, 47, "A block holds K or V of 16 tokens, for all layers. Any request may take any block."
    )
    tables = {"A": (35, (0, 5, 17), (1, 6, 18)), "B": (22, (2, 9), (3, 12))}
    places = [(20 + 58 * (block % 8), 62 + 58 * (block // 8)) for block in range(24)]
    for x, y in places:
        d.rect(x, y, 52, 52, "#f1f3f5", "#b6bec6", 3)
    for name, (tokens, *planes) in tables.items():
        for letter, ids in zip("KV", planes, strict=True):
            for index, block in enumerate(ids):
                (x, y), fill = places[block], min(tokens / 16 - index, 1.0)
                d.rect(x, y, 52 * fill, 52, OWNERS[name], "none", 3)
                d.text(x + (26 if fill == 1.0 else 34), y + 28, letter, bold=True)
    for block, (x, y) in enumerate(places):
        d.text(x + 47, y + 46, str(block), size=10, anchor="end")
    d.note(
        20,
        262,
        "Blocks 17 and 18 have room for 13 more tokens of A. For the one after, A takes",
        "any two free blocks. When A ends, its blocks go back to the stack of free ones.",
    )
    for place, (name, (tokens, *planes)) in enumerate(tables.items()):
        _table(d, 520, 62 + 104 * place, name, tokens, planes)
    return d


def _table(
    d: Drawing, x: float, y: float, name: str, tokens: int, planes: Sequence[Sequence[int]]
) -> None:
    d.rect(x, y, 280, 92, PAPER, OWNERS[name])
    d.rect(x + 12, y + 12, 16, 16, OWNERS[name], "none", 3)
    d.text(x + 36, y + 25, f"request {name}: {tokens} tokens", anchor="start", bold=True)
    for i, (letter, ids) in enumerate(zip("KV", planes, strict=True)):
        row = f"{letter} blocks: {', '.join(map(str, ids))}"
        d.text(x + 14, y + 52 + 24 * i, row, anchor="start")


def loop() -> Drawing:
    """The overlap of host and device, as a time line."""
    d = Drawing(880, 318, "The loop: the host finishes a step while the device runs the next")
    d.arrow((110, 24), (864, 24), colour=QUIET)
    d.text(104, 28, "time", anchor="end", size=12, colour=QUIET)
    lanes = ((40, "host", "plans"), (124, "device", "runs"), (208, "host", "finishes"))
    for y, who, what in lanes:
        d.text(20, y + 20, who, anchor="start", bold=True)
        d.note(20, y + 37, what)
    run = 216
    for step in range(1, 4):
        begin = 196 + run * (step - 1)
        planned = 110 if step == 1 else begin - run + 4 if step == 2 else begin - run + 88
        d.rect(planned, 40, 80, 46, HOST, BORDER[HOST], 4)
        d.text(planned + 40, 60, f"plan {step}", size=12, bold=True)
        d.text(planned + 40, 77, "build, launch", size=11, colour=QUIET)
        d.arrow((planned + 80, 86), (begin + 4, 122))
        d.rect(begin, 124, run - 4, 46, DEVICE, BORDER[DEVICE], 4)
        d.text(begin + run / 2, 152, f"step {step}", size=12, bold=True)
        if step < 3:
            end = begin + run
            d.rect(end + 4, 208, 80, 46, HOST, BORDER[HOST], 4)
            d.text(end + 44, 228, f"finish {step}", size=12, bold=True)
            d.text(end + 44, 245, "text, stream", size=11, colour=QUIET)
            d.arrow((end - 8, 170), (end + 8, 206), colour=BORDER[DEVICE], dashed=True)
    d.note(
        110,
        284,
        "The host is one thread: plan 2, then wait for step 1, finish 1, plan 3, and so on.",
    )
    d.note(
        110, 302, "Step 2 does not wait for the host: it takes step 1's tokens where they are made."
    )
    return d


def cache_reads() -> Drawing:
    """The three ways in which a query meets what its request has cached."""
    d = Drawing(860, 330, "Three reads of a cache: K and V, absorbed hidden, projected hidden")
    lanes = (
        (50, "K and V", "paged_attention"),
        (146, "hidden, absorbed", "absorbed_attention"),
        (242, "hidden, projected", "projected_attention"),
    )
    for y, name, function in lanes:
        d.text(20, y + 28, name, anchor="start", bold=True)
        d.note(20, y + 46, function)
    for x, name in ((222, "query"), (410, "blocks"), (622, "softmax, sum"), (786, "output")):
        d.text(x, 28, name, size=12, colour=QUIET)
    for y, query, block, result in (
        (50, ("q",), ("K | V", "two blocks for 16 tokens"), ("sum of a v",)),
        (146, ("Wk q", "weights folded in"), ("x", "one block"), ("Wv (sum of a x)",)),
        (242, ("q",), ("x", "one block"), ("sum of a v",)),
    ):
        d.box(158, y, 128, 60, HOST, *query)
        d.box(330, y, 160, 60, DEVICE, *block)
        d.box(722, y, 128, 60, HOST, *result)
        d.arrow((286, y + 30), (328, y + 30))
        d.arrow((682, y + 30), (720, y + 30))
    d.box(562, 50, 120, 60, OUTSIDE, "q.k, then v")
    d.box(562, 146, 120, 60, OUTSIDE, "x twice", "keys and values")
    d.box(562, 242, 120, 60, OUTSIDE, "q.k, then v")
    d.arrow((490, 80), (560, 80))
    d.arrow((490, 176), (560, 176))
    d.arrow((490, 272), (560, 272))
    d.text(525, 262, "Wk, Wv", size=11.5, colour=QUIET)
    d.text(525, 290, "rotate", size=11.5, colour=QUIET)
    d.note(158, 322, "K and V made of x stay on the chip: they are used at once and forgotten.")
    return d


def shared_blocks() -> Drawing:
    """A block with two owners: it has room, one end grows over the other, and that comes back."""
    d = Drawing(900, 330, "A block that two requests fill: what is written over, and comes back")
    d.note(
        20,
        24,
        "A block of 16 tokens. Real-time A fills it from the left, best-effort b from the",
        "right. Slots in order of the block; b's tokens count from its own end.",
    )
    notes = (
        ("Nothing moves: A takes", "slots that b has not used."),
        ("What A is about to write", "over goes to the host. b waits."),
        ("The slots are free: what b", "lacks comes back in place."),
        ("b takes what is left of it to", "a free block; the rest joins it."),
    )
    states = (
        (20, "Room for both", 5, 8, 0),
        (240, "A grows over b", 11, 5, 3),
        (460, "A has ended", 0, 8, 0),
        (680, "A goes on", 14, 0, 0),
    )
    for (x, name, left, right, away), lines in zip(states, notes, strict=True):
        d.text(x, 82, name, anchor="start", bold=True)
        _slots(d, x, 96, left, right)
        d.note(x, 146, *lines)
        if away:
            d.text(x, 232, "host memory", anchor="start", size=12, colour=QUIET)
            _slots(d, x, 242, 0, away, slots=away)
            d.arrow((x + 12.5 * 9.5, 124), (x + 18, 240), dashed=True)
    d.text(680, 232, "another block", anchor="start", size=12, colour=QUIET)
    _slots(d, 680, 242, 0, 8)
    for x in (226, 446, 666):
        d.arrow((x - 6, 110), (x + 10, 110), colour=QUIET)
    d.rect(20, 298, 14, 14, OWNERS["A"], "none", 3)
    d.note(40, 310, "A, real-time")
    d.rect(150, 298, 14, 14, OWNERS["B"], "none", 3)
    d.note(170, 310, "b, best-effort")
    d.note(300, 310, "No plan is booked that writes over what is nowhere else.")
    return d


def _slots(d: Drawing, x: float, y: float, left: int, right: int, slots: int = 16) -> None:
    """A block's slots, so many of them filled from either end."""
    width = 12.5
    for slot in range(slots):
        fill = OWNERS["A"] if slot < left else OWNERS["B"] if slot >= slots - right else "#f1f3f5"
        d.rect(x + width * slot, y, width - 1.5, 28, fill, "#b6bec6", 2)


def gateway() -> Drawing:
    """Who chooses a replica behind a Gateway."""
    d = Drawing(760, 236, "A gateway asks a picker, which reads the replicas' metrics")
    d.box(14, 40, 120, 66, OUTSIDE, "client", "OpenAI's API")
    d.box(226, 40, 150, 66, HOST, "Gateway", "HTTPRoute,", "InferencePool")
    d.box(226, 158, 150, 66, HOST, "endpoint picker", "queue, cache in use")
    for i in range(3):
        d.box(560, 14 + 74 * i, 180, 60, DEVICE, f"jaxserve {i + 1}", "a Pod, one engine")
        d.arrow((376, 191), (558, 50 + 74 * i), colour=QUIET, dashed=True)
    d.arrow((134, 73), (224, 73))
    d.arrow((286, 106), (286, 156))
    d.arrow((316, 158), (316, 108))
    d.arrow((376, 73), (558, 112))
    d.note(324, 136, "which one?")
    d.note(392, 222, "GET /metrics")
    return d


def ray() -> Drawing:
    """A call's way through a deployment on Ray Serve."""
    d = Drawing(880, 222, "A call on Ray Serve: proxy, ingress, router, replicas, and back")
    d.box(14, 76, 110, 70, OUTSIDE, "client")
    d.box(170, 76, 130, 70, OUTSIDE, "Ray Serve's proxy", "HTTP or gRPC")
    d.box(346, 76, 200, 70, HOST, "ingress", "asks what it costs,", "router: which replica")
    for y, name in ((14, "replica 1"), (134, "replica 2")):
        d.box(660, y, 200, 70, DEVICE, name, "doors and engine")
        d.arrow((546, 104), (600, 104), (600, y + 28), (658, y + 28))
        d.arrow((658, y + 48), (616, y + 48), (616, 118), (548, 118), dashed=True)
    d.arrow((124, 111), (168, 111))
    d.arrow((300, 111), (344, 111))
    d.note(346, 172, "dashed: answers, piece by piece, and snapshots")
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    "request-path": request_path,
    "block-pool": block_pool,
    "loop": loop,
    "cache-reads": cache_reads,
    "shared-blocks": shared_blocks,
    "gateway": gateway,
    "ray": ray,
}


def main(argv: Sequence[str]) -> None:
    """Writes every figure. argv: the folder, or nothing."""
    folder = Path(argv[0]) if argv else Path(__file__).parent
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
