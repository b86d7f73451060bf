"""Fits the figures of `jaxserve/simulator/systems/fitted_devices.json` to Vidur's tables.

    git clone https://github.com/microsoft/vidur
    python tools/fit_systems/fit.py vidur/data/profiling

Vidur (Agrawal et al., MLSys 2024; MIT licence) publishes medians of the operators of one layer, by
tokens and tensor parallelism, and of all-reduces, by bytes. A layer consists of its operators other
than attention and two all-reduces among the devices of one DGX. The fit minimises the squared
relative error, with non-negative coefficients; each doubling of the number of tokens has the same
weight, as has each model. Writes the file, and prints the table of docs/systems.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jaxserve.sched.cost.hardware import DEVICES, Device
from jaxserve.sched.cost.model_shapes import Model
from jaxserve.simulator.systems.layers import FIGURES, LayerWork

KINDS = ("a100", "h100")
COUNTS = (1, 2, 4, 8)
MAX_TOKENS = 4096
OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
ORIGIN = {
    "origin": "figures computed by tools/fit_systems/fit.py from the tables of Vidur "
    "(Agrawal et al., MLSys 2024, arXiv 2405.05465), https://github.com/microsoft/vidur, "
    "data/profiling",
    "licence": "of the tables: MIT, Copyright (c) Microsoft Corporation",
}


@dataclass(frozen=True)
class Table:
    """Measured times of one layer of a model.

    Attributes:
        kind: Name of the device.
        devices: How many of them share the layer.
        model: Its shape.
        tokens: Int [n], tokens of a batch.
        seconds: Float [n], their times.
    """

    kind: str
    devices: int
    model: Model
    tokens: np.ndarray
    seconds: np.ndarray

    @property
    def device(self) -> Device:
        """Data sheet of one device."""
        return DEVICES[self.kind]

    @property
    def weight(self) -> np.ndarray:
        """Weight of each size in the fit, [n], with sum 1: equal for each doubling."""
        octave = np.floor(np.log2(self.tokens)).astype(int)
        share = 1.0 / np.bincount(octave)[octave]
        return np.asarray(share / share.sum())

    def features(self) -> np.ndarray:
        """Seconds [n, coefficients] at the data sheet's rates, which the shares and latencies of
        `Figures` multiply."""
        work, ones = LayerWork.from_model(self.model, self.devices), np.ones(len(self.tokens))
        device, n = self.device, self.tokens
        latencies = [2.0 * (self.devices == count) * ones for count in COUNTS[1:]]
        return np.stack(
            [
                ones,
                ones * work.weights / device.bandwidth,
                n * work.flops / device.flops,
                n * work.elementwise / device.bandwidth,
                n * work.exchanged / device.link,
                *latencies,
            ],
            axis=1,
        )

    def assumed(self) -> np.ndarray:
        """Seconds [n] by the earlier rule of thumb: weights at 94% of bandwidth, FLOPs at 68% of
        peak, nothing else."""
        work = LayerWork.from_model(self.model, self.devices)
        token = work.flops / (0.68 * self.device.flops)
        return np.asarray(work.weights / (0.94 * self.device.bandwidth) + token * self.tokens)


def read_tables(folder: Path, kind: str) -> Iterator[Table]:
    """All models of Meta in Vidur's data/profiling for this kind of device."""
    reduces = _all_reduces(folder / "network" / f"{kind}_dgx" / "all_reduce.csv")
    paths = sorted((folder / "compute" / kind / "meta-llama").glob("*/mlp.csv"))
    if not paths:
        raise ValueError(f"{folder}: no compute/{kind}/meta-llama/*/mlp.csv in it")
    for path in paths:
        for devices, rows in _by_devices(path).items():
            yield _table(kind, devices, rows, reduces)


def fit(tables: Sequence[Table]) -> dict[str, Any]:
    """The figures of one kind of device, as in the file."""
    rows, target = [], []
    for table in tables:
        weight = np.sqrt(table.weight)
        rows.append(table.features() * (weight / table.seconds)[:, None])
        target.append(weight)
    matrix = np.concatenate(rows)
    size = np.linalg.norm(matrix, axis=0)
    coefficients, _ = nnls(matrix / size, np.concatenate(target))
    kernels, read, matmul, elementwise, link, *latencies = (
        float(f"{x:.4g}") for x in coefficients / size
    )
    shares = {"read": read, "matmul": matmul, "elementwise": elementwise, "link": link}
    unused = [name for name, value in shares.items() if value == 0]
    if unused:
        raise ValueError(f"the tables say nothing about {', '.join(unused)}")
    return {
        "kernels": kernels,
        **{name: float(f"{1 / value:.4g}") for name, value in shares.items()},
        "all_reduce": {str(c): value for c, value in zip(COUNTS[1:], latencies, strict=True)},
    }


def errors(tables: Sequence[Table], figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Per number of devices: mean and worst relative errors over all models and sizes, before and
    with the fit; octaves: the mean with equal weight for each doubling."""
    shares = [1 / figures[name] for name in ("read", "matmul", "elementwise", "link")]
    coefficients = np.array([figures["kernels"], *shares, *figures["all_reduce"].values()])
    for devices in COUNTS:
        mine = [table for table in tables if table.devices == devices]
        row: dict[str, Any] = {"kind": mine[0].kind, "devices": devices}
        for name in ("assumed", "fitted"):
            predicted = [
                t.assumed() if name == "assumed" else t.features() @ coefficients for t in mine
            ]
            size = [np.abs(s / t.seconds - 1) for s, t in zip(predicted, mine, strict=True)]
            every = np.concatenate(size)
            octaves = [(v * t.weight).sum() for v, t in zip(size, mine, strict=True)]
            of = {"mean": every.mean(), "octaves": np.mean(octaves), "worst": every.max()}
            row[name] = {key: round(float(value), 4) for key, value in of.items()}
        yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 for missing or unexpected tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="data/profiling of a clone of Vidur")
    parser.add_argument("--out", type=Path, default=FIGURES, help="the file (%(default)s)")
    args = parser.parse_args(argv)
    devices, off = {}, []
    try:
        for kind in KINDS:
            tables = list(read_tables(args.folder, kind))
            devices[kind] = fit(tables)
            off += errors(tables, devices[kind])
    except (OSError, KeyError, ValueError) as error:
        print(f"fit_systems: {error}", file=sys.stderr)
        return 1
    content = {**ORIGIN, "devices": devices, "errors": off}
    args.out.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print("\n".join(table_of(off)))
    return 0


def table_of(off: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: a line per kind and number of devices; errors as mean / mean over doublings /
    worst."""
    lines = ["| device | tensor parallel | before | fitted |", "|---|---|---|---|"]
    for row in off:
        cells = [
            " / ".join(f"{row[name][key]:.0%}" for key in ("mean", "octaves", "worst"))
            for name in ("assumed", "fitted")
        ]
        lines.append(f"| {row['kind']} | {row['devices']} | {' | '.join(cells)} |")
    return lines


def _by_devices(path: Path) -> dict[int, list[dict[str, str]]]:
    groups = defaultdict(list)
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["num_tokens"]) <= MAX_TOKENS:
                groups[int(row["num_tensor_parallel_workers"])].append(row)
    return {devices: groups[devices] for devices in COUNTS if devices in groups}


def _table(kind: str, devices: int, rows: list[dict[str, str]], reduces: dict[int, Any]) -> Table:
    names = ("n_embd", "n_expanded_embd", "n_head", "n_kv_head", "vocab_size")
    d_model, d_ff, heads, kv_heads, vocab = (int(rows[0][name]) for name in names)
    model = Model(1, d_model, d_ff, heads, kv_heads, d_model // heads, vocab)
    by_tokens = defaultdict(list)
    for row in rows:
        times = [float(row[f"time_stats.{name}.median"]) for name in OPERATORS]
        by_tokens[int(row["num_tokens"])].append(sum(times))
    tokens, seconds = _medians(by_tokens)
    if devices > 1:
        seconds = seconds + 2 * np.interp(tokens * 2 * model.d_model, *reduces[devices])
    return Table(kind, devices, model, tokens, seconds)


def _all_reduces(path: Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Bytes and seconds by number of devices, all in one machine."""
    samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["num_workers"] == row["devices_per_node"]:
                times = samples[int(row["num_workers"])][int(row["size"])]
                times.append(float(row["time_stats.all_reduce.median"]))
    return {devices: _medians(times) for devices, times in samples.items()}


def _medians(times: Mapping[int, Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """The keys, ascending, and their median times, in seconds."""
    keys = np.array(sorted(times))
    return keys, np.array([np.median(times[key]) for key in keys]) / 1e3


if __name__ == "__main__":
    sys.exit(main())
