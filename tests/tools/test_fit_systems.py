"""tools/fit_systems/fit.py: from tables in Vidur's layout to the figures that made them."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxserve.sched.cost.hardware import DEVICES
from jaxserve.sched.cost.model_shapes import Model
from jaxserve.simulator.systems.layers import LayerWork

ROOT = Path(__file__).parents[2]
SHAPES = {
    "Small": Model(1, 4096, 11008, 32, 8, 128, 99),
    "Large": Model(1, 8192, 20480, 64, 64, 128, 99),
}
SIZES = (1, 8, 64, 100, 256, 1000, 4096, 8192)
TRUE = {"kernels": 2e-5, "read": 0.8, "matmul": 0.7, "elementwise": 0.4, "link": 0.5}
LATENCY = {2: 1e-5, 4: 2e-5, 8: 4e-5}


def load() -> ModuleType:
    path = ROOT / "tools" / "fit_systems" / "fit.py"
    spec = importlib.util.spec_from_file_location("fit_systems", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fit = load()


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def tables(folder: Path, kind: str) -> None:
    """A layer as the true figures have it, all of it in one operator, and its all-reduces."""
    device, reduces = DEVICES[kind], []
    for name, model in SHAPES.items():
        layers = []
        shape = {"n_embd": model.d_model, "n_expanded_embd": model.d_ff, "n_head": model.heads}
        shape |= {"n_kv_head": model.kv_heads, "vocab_size": model.vocab}
        for devices in fit.COUNTS:
            work = LayerWork.from_model(model, devices)
            for n in SIZES:
                seconds = TRUE["kernels"] + work.weights / (TRUE["read"] * device.bandwidth)
                seconds += n * work.flops / (TRUE["matmul"] * device.flops)
                seconds += n * work.elementwise / (TRUE["elementwise"] * device.bandwidth)
                times = {f"time_stats.{operator}.median": 0.0 for operator in fit.OPERATORS}
                times["time_stats.mlp_up_proj.median"] = 1e3 * seconds
                sizes = {"num_tokens": n, "num_tensor_parallel_workers": devices}
                layers += 2 * [{**times, **shape, **sizes}]  # sizes come more than once
        write(folder / "compute" / kind / "meta-llama" / name / "mlp.csv", layers)
    for devices, latency in LATENCY.items():
        for size in np.geomspace(2048, 1 << 26, 400).astype(int).tolist():
            hops = 2 * (devices - 1) / devices
            seconds = latency + hops * size / (TRUE["link"] * device.link)
            row = {"num_workers": devices, "size": size, "devices_per_node": devices}
            across = {**row, "devices_per_node": 1, "time_stats.all_reduce.median": 1e9}
            reduces += [{**row, "time_stats.all_reduce.median": 1e3 * seconds}, across]
    write(folder / "network" / f"{kind}_dgx" / "all_reduce.csv", reduces)


def test_the_figures_that_made_the_tables_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in fit.KINDS:
        tables(tmp_path, kind)
    out = tmp_path / "figures.json"
    assert fit.main([str(tmp_path), f"--out={out}"]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    for kind in fit.KINDS:
        figures = found["devices"][kind]
        for name, value in TRUE.items():
            assert figures[name] == pytest.approx(value, rel=0.02), name
        latencies = {int(n): seconds for n, seconds in figures["all_reduce"].items()}
        assert latencies == pytest.approx(LATENCY, rel=0.05)
    for row in found["errors"]:
        assert row["fitted"]["worst"] < 0.02
        assert row["assumed"]["worst"] > 0.05
    assert capsys.readouterr().out.count("\n") == 2 + 8


def test_missing_and_strange_tables_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    tables(tmp_path, "a100")
    path = tmp_path / "compute" / "a100" / "meta-llama" / "Small" / "mlp.csv"
    path.write_text(path.read_text().replace("n_embd", "width"))
    assert fit.main([str(tmp_path)]) == 1
    assert "n_embd" in capsys.readouterr().err


def test_each_doubling_counts_the_same() -> None:
    tokens = np.array([1, 2, 3, 4, 5, 6, 7])
    table = fit.Table("a100", 1, SHAPES["Small"], tokens, np.ones(7))
    weight = table.weight
    assert weight[0] == pytest.approx(weight[1:3].sum())
    assert weight[0] == pytest.approx(weight[3:].sum())
    assert weight.sum() == pytest.approx(1.0)
