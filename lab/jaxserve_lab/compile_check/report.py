"""Results as lines, as JSON, as a page and as that page's table."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import platform
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxserve.pallas_kernels import default_block_size
from jaxserve.simulator.group_table import markdown
from jaxserve_lab.compile_check.analysis.ptx import KernelUse
from jaxserve_lab.compile_check.case import BACKENDS, Sizes
from jaxserve_lab.compile_check.check import Checked
from jaxserve_lab.compile_check.compiling import COMPILED, NOT_CHECKED, Result

GIB = 1 << 30
PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")
_COLUMNS = ("arguments", "outputs", "aliased", "temporaries", "code")
PROGRAMS = (
    *("section", "target", "program", "seconds"),
    *(f"{name}_gib" for name in (*_COLUMNS, "needed")),
    *("fits", "bytes_over_floor", "weights_moved_gib", "kernels_a_layer", "on_chip"),
)


def versions() -> dict[str, str]:
    """Version of each compiler by package name, and of Python; "" if not installed."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            numbers[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            numbers[name] = ""
    return numbers


def header() -> str:
    """The names of `line`'s columns, with the same widths."""
    memory = "".join(f"{name[:9]:>10}" for name in _COLUMNS)
    return f"{'target':<8}{'model':<12}{'x':>2} {'program':<24}{'s':>6}{memory}{'needed':>9}"


def line(result: Result) -> str:
    """One result as a line of a table: seconds, then memory in GiB on each device, by kind."""
    start = f"{result.target:<8}{result.model:<12}{result.devices:>2} {result.program:<24}"
    if result.status != COMPILED:
        return f"{start}{result.status.upper()}: {result.reason}"
    memory = "".join(f"{result.memory[name] / GIB:>10.3f}" for name in _COLUMNS)
    verdict = {True: "  fits", False: "  DOES NOT FIT", None: ""}[result.fits]
    text = f"{start}{result.seconds:>6.1f}{memory}{result.needed / GIB:>9.3f}{verdict}"
    text = f"{text}  {on_chip(result)}" if on_chip(result) != "-" else text
    return "".join([text, *(f"  BAD: {problem}" for problem in result.findings.problems)])


def on_chip(result: Result) -> str:
    """For GPU kernels, the most registers and shared memory, and all spills; for TPU kernels, the
    cycles of their loops."""
    if result.findings.kernels:
        return registers(result.findings.kernels)
    loops = [loop for loop in result.findings.loops if loop.cycles]
    return (
        "; ".join(f"{loop.name} {'+'.join(map(str, loop.cycles))} cycles" for loop in loops) or "-"
    )


def registers(kernels: Sequence[KernelUse]) -> str:
    """The most registers and shared memory of any of the kernels, and all spills."""
    most = max(use.registers for use in kernels)
    spilled = [use for use in kernels if use.spill_stores or use.spill_loads]
    names = ", ".join(f"{u.name} {u.spill_stores}/{u.spill_loads} B" for u in spilled)
    shared = max(use.shared for use in kernels) / 1024
    return (
        f"{most} registers, {shared:.0f} KiB shared, {f'spills {names}' if names else 'no spills'}"
    )


def summary(checked: Sequence[Checked]) -> list[str]:
    """The verdicts, one line per model and target."""
    return [f"{model.target.name}, {model.model}: {verdict(model)}" for model in checked]


def _label(result: Result) -> str:
    """The target, and the number of devices if several."""
    return result.target if result.devices < 2 else f"{result.target} x {result.devices}"


def verdict(one: Checked) -> str:
    """The verdict in words; a target that was not checked says so."""
    first = one.results[0] if one.results else None
    if first is not None and first.status == NOT_CHECKED:
        return f"not checked: {first.reason}"
    bad = [result for result in one.results if result.is_bad]
    if bad:
        return f"FAILED: {', '.join(result.program for result in bad)}"
    if one.case is None or first is None:
        return "not checked: none of the programs applies"
    compiled = sum(result.status == COMPILED for result in one.results)
    plural = "s" if one.case.shards > 1 else ""
    return f"{compiled} programs compiled, {one.case.shards} device{plural}, {_backend(one)}"


def _backend(one: Checked) -> str:
    assert one.case is not None
    return one.case.backend + (f" ({one.case.note})" if one.case.note else "")


def as_json(checked: Sequence[Checked]) -> dict[str, Any]:
    """All results, as `json` can write them."""
    return {
        "command": "compile_check",
        "versions": versions(),
        "targets": [
            {
                "target": model.target.name,
                "device": model.target.device,
                "device_memory_bytes": model.target.memory_bytes,
                "model": model.model,
                "verdict": verdict(model),
                "too_small": model.too_small,
                **_layout(model),
                "programs": [result.as_json() for result in model.results],
            }
            for model in checked
        ],
    }


def _layout(one: Checked) -> dict[str, Any]:
    case = one.case
    if case is None:
        return {}
    return {
        "devices": case.shards,
        "topology": case.target.topology(case.shards),
        "hosts": len({device.process_index for device in case.mesh.devices.flat}),
        "backend": case.backend,
        "backend_note": case.note,
        "weights_bytes": case.weights_bytes,
        "pool_bytes": case.pool_bytes,
        "pool_blocks": case.blocks,
    }


def page(checked: Sequence[Checked], sizes: Sizes, command: Sequence[str], before: str = "") -> str:
    """The Markdown text of docs/targets.md.

    Args:
        checked: The results.
        sizes: The engine's configuration, as on the command line.
        command: The command line's flags.
        before: The previous page. Its other sections are kept.
    """
    import jinja2

    _, *old = before.split("\n## ")
    sections = {text.partition("\n")[0]: f"## {text.strip()}" for text in old}
    for title, models in _by_title(checked, sizes).items():
        sections[title] = "\n\n".join([f"## {title}", _how(sizes, command), _overview(models)])
    text = (Path(__file__).parent / "page.md.j2").read_text(encoding="utf-8")
    template = jinja2.Template(text, trim_blocks=True, keep_trailing_newline=True)
    return template.render(sections=list(sections.values()))


def programs(checked: Sequence[Checked], sizes: Sizes, before: str = "") -> str:
    """The page's table of all programs, as CSV; arguments as in `page`."""
    rows_by_title: dict[str, list[Sequence[object]]] = {}
    for row in list(csv.reader(before.splitlines()))[1:]:
        rows_by_title.setdefault(row[0], []).append(row)
    for title, models in _by_title(checked, sizes).items():
        rows_by_title[title] = [
            _cells(title, model, result) for model in models for result in model.results
        ]
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerows([PROGRAMS, *(row for rows in rows_by_title.values() for row in rows)])
    return lines.getvalue()


def _by_title(checked: Sequence[Checked], sizes: Sizes) -> dict[str, list[Checked]]:
    groups: dict[str, list[Checked]] = {}
    for model in checked:
        groups.setdefault(_title(model, sizes), []).append(model)
    return groups


def _cells(title: str, one: Checked, result: Result) -> list[object]:
    """The table's cells for one program; single kernels lack the columns of steps."""
    about: list[object] = [title, _label(result), result.program]
    if result.status != COMPILED:
        return [*about, *[""] * (len(PROGRAMS) - 4), f"{result.status}: {result.reason}"]
    memory = [f"{result.memory[name] / GIB:.4f}" for name in _COLUMNS]
    step = [""] * 5
    if result.fits is not None:
        layers = one.case.config.num_layers if one.case else 1
        findings = result.findings
        step = [
            f"{result.needed / GIB:.4f}",
            "yes" if result.fits else "no",
            f"{findings.traffic.times_floor:.2f}",
            f"{findings.weights_moved / GIB:.4f}",
            f"{findings.traffic.kernels / layers:.1f}",
        ]
    return [*about, f"{result.seconds:.1f}", *memory, *step, on_chip(result)]


def _title(one: Checked, sizes: Sizes) -> str:
    """A section's title: the model, and settings that are not defaults."""
    parts = [one.model, sizes.quantization]
    own = BACKENDS.get(one.target.platform)
    if one.case and not one.case.note and own not in (None, one.case.backend):
        parts.append(f"by {one.case.backend}")
    if sizes.cache != "auto":
        parts.append(f"caches of {sizes.cache}")
    if sizes.lora is not None:
        parts.append(f"{sizes.lora.count} adapters of rank {sizes.lora.rank}")
    return ", ".join(part for part in parts if part)


def _how(sizes: Sizes, command: Sequence[str]) -> str:
    """The command, sizes and versions of a section."""
    used = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    text = (
        f"{sizes.max_rows} requests, {sizes.max_batch_tokens} tokens, {sizes.dtype}, blocks of "
        f"{_blocks(sizes)} tokens; {used}."
    )
    lines = textwrap.wrap(text, 100, break_on_hyphens=False)
    version = ".".join(map(str, sys.version_info[:2]))
    python = "" if version == "3.11" else f"PYTHON=python{version} "
    return "\n".join([f'    make compile-check {python}ARGS="{shlex.join(command)}"', "", *lines])


def _blocks(sizes: Sizes) -> str:
    """Tokens of a block, for each platform by default."""
    if sizes.block_size:
        return str(sizes.block_size)
    return f"{default_block_size('tpu')} (TPUs) or {default_block_size('cuda')} (GPUs)"


def _overview(ones: Sequence[Checked]) -> str:
    head = ("target", "devices", "weights", "pool", "needs at most", "backend", "result")
    rows = []
    for one in ones:
        case = one.case
        laid = ["-"] * 3
        if case is not None:
            laid = [str(case.shards), _gib(case.weights_bytes), _gib(case.pool_bytes)]
        needed = [result.needed for result in one.results if result.fits is not None]
        most = f"{_gib(max(needed))} of {_gib(one.target.memory_bytes)}" if needed else "-"
        backend = "-" if case is None else _backend(one)
        rows.append([one.target.name, *laid, most, backend, verdict(one).split(",")[0]])
    return markdown(head, rows)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 10 else f"{size / 2**20:.1f} MiB"
