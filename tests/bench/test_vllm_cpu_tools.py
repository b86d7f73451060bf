"""The parts of tools/vllm_cpu that do not need vLLM."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve.models.presets import preset

FOLDER = Path(__file__).parents[2] / "tools" / "vllm_cpu"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"vllm_cpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench, compare = load("bench"), load("compare")


def test_both_sides_run_the_same_shape() -> None:
    ours = preset("opt-125m")
    assert {name: bench.OPT_125M[name] for name in ours} == ours


def test_vllm_computes_on_all_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {3, 1})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    settings = bench.cpu_settings()
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "1,3"
    assert settings["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_rates() -> None:
    found = bench.rates([2.0, 4.0, 1.0], 100)
    assert found["output_tokens_per_s"] == {"median": 50.0, "values": [50.0, 25.0, 100.0]}


def ours(command: str, rate: float) -> dict[str, Any]:
    return {"command": command, "results": {"output_tokens_per_s": {"median": rate}}}


def theirs(batch: float, single: float) -> dict[str, Any]:
    rates = {"batch": batch, "single": single}
    results = {name: {"output_tokens_per_s": {"median": rate}} for name, rate in rates.items()}
    return {"command": "vllm", "results": results}


def a_round(batch: float, single: float) -> dict[str, Any]:
    """vLLM: 100 and 20 tokens/s in float32, 200 and 40 in bfloat16."""
    return {
        "throughput": ours("throughput", batch),
        "latency": ours("latency", single),
        "float32": theirs(100.0, 20.0),
        "bfloat16": theirs(200.0, 40.0),
    }


def test_ratios_are_of_the_same_round() -> None:
    slow = a_round(150.0, 30.0)
    slow["float32"] = theirs(50.0, 10.0)
    summary = compare.summarise([a_round(200.0, 40.0), slow, a_round(220.0, 50.0)])
    assert summary["batch"]["jaxserve"] == 200.0
    assert summary["batch"]["ratios_float32"] == [2.0, 3.0, 2.2]
    assert summary["batch"]["ratio_float32"] == 2.2
    assert summary["single"]["ratio_bfloat16"] == 1.0


def test_the_table_is_markdown() -> None:
    result = {"workload": {"num_requests": 32}, "summary": compare.summarise([a_round(250, 35)])}
    lines = compare.table(result).splitlines()
    assert lines[2] == "| 32 requests at once | 250.0 | 100.0 | 200.0 | 2.50 | 1.25 |"
    assert lines[3] == "| one request alone | 35.0 | 20.0 | 40.0 | 1.75 | 0.88 |"


def test_the_result_is_found_among_log_lines() -> None:
    text = "\n".join(['{"other": 1}', json.dumps({"command": "vllm"}), "shutting down", "3"])
    assert compare.last_json(text) == {"command": "vllm"}
    with pytest.raises(compare.CompareError, match="no JSON"):
        compare.last_json("nothing here\n[1]")


def test_a_failing_run_is_named() -> None:
    with pytest.raises(compare.CompareError, match=r"exited with 3:\nbad luck"):
        compare.run(
            [sys.executable, "-c", "import sys; print('bad luck', file=sys.stderr); sys.exit(3)"]
        )


def test_the_commands_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """jaxserve's command lines are ones that its bench understands."""
    from jaxserve.bench import cli

    commands: list[list[str]] = []
    monkeypatch.chdir(compare.ROOT)
    monkeypatch.setattr(compare, "run", lambda command: commands.append(command) or {})
    compare.one_round(compare.parse(["--repeats=2"]))
    assert [c[3] for c in commands[:2]] == ["throughput", "latency"]
    for command in commands[:2]:
        args, config = cli.parse(command[3:])
        assert args.input_len == 128 and args.output_len == 64 and args.json
        assert config is not None and config.model.preset == "opt-125m"
        assert config.engine.max_model_len == 512
    for command, dtype in zip(commands[2:], compare.DTYPES, strict=True):
        args = bench.parse(command[2:])
        assert (args.dtype, args.num_requests, args.repeats) == (dtype, 32, 2)
