"""The parts of tools/vllm_cpu and tools/llama_cpp that need neither vLLM nor llama.cpp."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.models.dense import sequence_logits
from jaxserve.models.presets import preset
from jaxserve.weights import load_config, load_params
from tests.models.fixtures import hf_config, load_reference
from tests.models.gguf_files import write_reference

FOLDER = Path(__file__).parents[2] / "tools" / "vllm_cpu"


sys.path.append(str(FOLDER))  # a folder of scripts, not a package
bench, compare = map(importlib.import_module, ("bench", "compare"))


@pytest.mark.parametrize("model", bench.workload.MODELS)
def test_both_sides_run_the_same_shape(model: str) -> None:
    ours, theirs = preset(model), bench.shape(model)
    assert theirs == ours | {"architectures": theirs["architectures"]}


def test_vllm_computes_on_all_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda pid: {3, 1})
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    settings = bench.cpu_settings()
    assert settings["VLLM_CPU_OMP_THREADS_BIND"] == "1,3"
    assert settings["VLLM_CPU_KVCACHE_SPACE"] == "7"


def ours(command: str, rate: float) -> dict[str, Any]:
    return {"command": command, "results": {"output_tokens_per_s": {"median": rate}}}


def theirs(batch: float, single: float) -> dict[str, Any]:
    rates = {"batch": batch, "single": single}
    results = {name: {"output_tokens_per_s": {"median": rate}} for name, rate in rates.items()}
    return {"command": "vllm", "results": results}


def a_round(batch: float, single: float, slow: float = 1.0) -> dict[str, Any]:
    """vLLM: 100 and 20 tokens/s in float32, 200 and 40 in bfloat16, or as many times fewer."""
    return {
        dtype: {
            "throughput": ours("throughput", batch),
            "latency": ours("latency", single),
            "vllm": theirs(100.0 * faster / slow, 20.0 * faster / slow),
        }
        for dtype, faster in (("float32", 1), ("bfloat16", 2))
    }


def test_ratios_are_of_the_same_round() -> None:
    rounds = [a_round(200.0, 40.0), a_round(150.0, 30.0, slow=2.0), a_round(220.0, 50.0)]
    summary = compare.summarise(rounds)
    assert summary["batch"]["float32"]["jaxserve"] == 200.0
    assert summary["batch"]["float32"]["ratios"] == [2.0, 3.0, 2.2]
    assert summary["batch"]["float32"]["ratio"] == 2.2
    assert summary["single"]["bfloat16"]["ratio"] == 1.25


def test_the_table_has_each_targets_verdict() -> None:
    workload = {"model": "opt-125m", "num_requests": 32}
    result = {"workload": workload, "summary": compare.summarise([a_round(106, 23)])}
    lines = compare.table(result).splitlines()[2:]
    assert lines == [
        "| 32 requests at once | float32 | 106.0 | 100.0 | 1.06 | at least 1.05 | met |",
        "| 32 requests at once | bfloat16 | 106.0 | 200.0 | 0.53 | at least 1.05 | missed |",
        "| one request alone | float32 | 23.0 | 20.0 | 1.15 | at least 1.20 | missed |",
        "| one request alone | bfloat16 | 23.0 | 40.0 | 0.57 | at least 1.00 | missed |",
    ]
    workload["model"] = "qwen2.5-0.5b"
    assert all("| reported |  |" in line for line in compare.table(result).splitlines()[2:])


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
    assert len(commands) == 3 * len(compare.DTYPES)
    for dtype, some in zip(compare.DTYPES, (commands[:3], commands[3:]), strict=True):
        assert [c[4] for c in some[:2]] == ["throughput", "latency"]
        for command in some[:2]:
            args = cli.parse(command[4:])
            assert args.input_len == 128 and args.output_len == 64 and args.json
            assert args.config.model.preset == "opt-125m"
            assert (args.config.engine.max_model_len, args.config.model.dtype) == (512, dtype)
        args = bench.parse(some[2][2:])
        assert (args.model, args.dtype) == ("opt-125m", dtype)
        assert (args.num_requests, args.repeats) == (32, 2)


LLAMA_CPP = Path(__file__).parents[2] / "tools" / "llama_cpp"

sys.path.append(str(LLAMA_CPP))  # a folder of scripts, not a package
make_files, side_by_side = map(importlib.import_module, ("make_files", "side_by_side"))


def compared(type_: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    rates = {"jaxserve": ours, "llama.cpp": theirs}
    return {"model": "smollm2", "type": type_, "rates": {"decode": rates}}


def verdict(rows: str) -> list[str]:
    return [line.split("|")[-2].strip() for line in rows.splitlines()[2:]]


def test_the_median_of_the_rounds_ratios_decides() -> None:
    rows = side_by_side.table([compared("float32", [99, 10, 101], [100, 10, 100])])
    assert "| 99.0 | 100.0 | 1.00 | 1.0 | met |" in rows


def test_each_type_is_to_be_faster_than_the_wider_one() -> None:
    rates = {"float32": 40.0, "bfloat16": 50.0, "int8": 50.0, "int4": 60.0, "int4-zero": 55.0}
    rows = side_by_side.table([compared(t, [rate], [50.0]) for t, rate in rates.items()])
    slow = "no faster than the wider one"
    assert verdict(rows) == ["missed", "met", f"met, {slow}", "met", "met"]


def test_both_sides_have_their_turn_in_each_round() -> None:
    turns = list(side_by_side.in_turns(["a", "b"], ["x", "y"], 2))
    first = [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
    assert turns == [*first, ("a", "y"), ("a", "x"), ("b", "y"), ("b", "x")]


def test_what_there_is_not_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        side_by_side.parse(["--models=opt-125m"])
    assert "must be of smollm2,qwen2.5-0.5b" in capsys.readouterr().err


def test_a_shuffled_model_computes_what_it_did(tmp_path: Path) -> None:
    """But its groups of weights are others."""
    file = tmp_path / "model.gguf"
    write_reference(file, hf_config("llama3") | {"rope_scaling": None, "num_hidden_layers": 1})
    tokens = load_reference("llama3").tokens[0]

    @functools.cache
    def compiled(family: Any, config: Any) -> Any:
        run = functools.partial(sequence_logits, dtype="float32")
        return jax.jit(lambda params: run(family, params, config, tokens))

    def read() -> tuple[np.ndarray, np.ndarray]:
        family, config, _ = load_config(file)
        params = load_params(file, family, config, dtype="float32")
        logits = compiled(family, config)(params)
        return np.asarray(logits), np.asarray(params.layers[0].attn.v.kernel)

    logits, v = read()
    make_files.shuffle(file)
    now, shuffled = read()
    np.testing.assert_allclose(now, logits, rtol=1e-4, atol=1e-4)
    assert not np.array_equal(v, shuffled)
    assert np.array_equal(np.sort(v, axis=None), np.sort(shuffled, axis=None))


def test_random_files_have_the_presets_weights(tmp_path: Path) -> None:
    hf = preset("qwen2.5-0.5b") | {"num_hidden_layers": 1, "vocab_size": 64}
    make_files.write_random(tmp_path / "model.gguf", hf)
    shapes = dict(make_files.shapes(hf))
    assert sum(np.prod(shape) for name, shape in shapes.items() if ".0." in name) == 14_912_384
    assert (tmp_path / "model.gguf").stat().st_size > 4 * 14_912_384
