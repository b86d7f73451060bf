"""The kernel bench at toy size, with XLA's kernels on the CPU."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve.pallas_kernels import HIDDEN, RIGHT
from jaxserve_lab.bench.kernels import device_timing, kernels
from jaxserve_lab.bench.kernels import kernel_inputs as inputs
from jaxserve_lab.bench.kernels.device_timing import DEVICE, HOST, Loop, measure
from jaxserve_lab.bench.kernels.kernel_cases import Workload, cases
from jaxserve_lab.bench.kernels.kernel_inputs import Heads, Row

TOY = ["--rows=2", "--context=20", "--prefill=24", "--moves=6", "--layers=2", "--matrix=64"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of a few calls: the numbers do not matter here."""
    monkeypatch.setattr(device_timing, "MOST", 3)


@pytest.mark.slow
def test_the_command_measures_every_kernel(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["kernels", "--model=tiny", "--dtype=float32", "--json", *TOY]
    assert cli.main(flags) == 0
    said = capsys.readouterr()
    result = json.loads(said.out)
    names = [one["kernel"] for one in result["kernels"]]
    assert names == [
        "decode attention",
        "attention with 3 drafts",
        "prefill attention",
        "absorbed hidden decode",
        "projected hidden decode",
        "write",
        "move",
        "stage out",
        "stage in",
    ]
    assert all(name in said.err for name in names)
    assert result["ceilings"]["copy"] > 0 and result["ceilings"]["matmul"] > 0
    for one in result["kernels"]:
        assert (one["clock"], one["backend"]) == (HOST, "numba")
        assert one["seconds"] >= 0 and one["bytes_per_s"] > 0
    assert result["workload"]["context"] == 20


@pytest.mark.slow
def test_on_a_terminal_it_shows_how_far_it_is(
    quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert cli.main(["kernels", "--model=tiny", "--dtype=float32", *TOY]) == 0
    said = capsys.readouterr()
    assert "measuring the rates of a copy and a matrix product" in said.err.splitlines()[0]
    assert "9/9" in said.err and "9/9" not in said.out
    assert len(said.out.splitlines()) == 2 + 9


def test_what_must_be_moved_and_done_is_counted() -> None:
    """OPT-13B at the issue's sizes, by hand."""
    found = {case.name: case for case in cases(inputs.model_heads("opt-13b"), Workload(), "xla")}
    tokens, width, layers = 32 * 2048, 5120, 4
    kv = found["decode attention"]
    assert kv.moved == 2 * (2 * tokens * width + 2 * 32 * width)
    assert kv.operations == 4 * tokens * width
    small = next(cases(inputs.model_heads("opt-13b"), Workload(dtype="int8"), "xla"))
    assert small.moved == 2 * tokens * (width + 4 * 40) + 2 * 2 * 32 * width
    hidden = found["absorbed hidden decode"]
    assert hidden.moved == 2 * (tokens * width + 2 * 32 * 40 * width)
    assert hidden.operations == 40 * kv.operations
    assert found["prefill attention"].operations == 2 * 4096 * 4097 * width
    assert found["write"].moved == 2 * 4 * 4096 * width
    assert found["move"].moved == 2 * 2 * 4096 * layers * width


def test_grouped_and_rotary_models_have_fewer_kernels() -> None:
    def names(model: str) -> set[str]:
        return {case.name for case in cases(inputs.model_heads(model), Workload(), "xla")}

    grouped, rotary = names("llama-3-8b"), names("llama-2-7b")
    assert not any("hidden" in name for name in grouped)
    assert rotary - grouped == {"projected hidden decode"}


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--rows=0", "--rows must be at least 1, got 0"),
        ("--matrix=-3", "--matrix must be at least 1, got -3"),
        ("--model=opt-14b", "'opt-14b' is not known"),
        ("--dtype=int7", "invalid choice: 'int7'"),
    ],
)
def test_a_wrong_flag_is_explained(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        kernels.parse([flag])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_backend_is_one_line(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["kernels", "--model=tiny", "--backend=cuda", *TOY]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "backend: must be auto or one of" in error


def test_a_loop_runs_its_calls_in_order() -> None:
    def step(i: jax.Array, carry: jax.Array, inputs: Any) -> jax.Array:
        return 2 * carry + i + inputs

    loop = Loop(step, jnp.int32(1), jnp.int32(0))
    loop.compiled(3)()  # once to compile, once more here
    assert int(loop.carry) == 8 * (8 * 1 + 4) + 4


@pytest.mark.parametrize("cost", [1e-4, 0.25])
def test_a_call_takes_what_a_longer_loop_takes_more(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """On a clock that only the loops move: 3 s to launch one, and `cost` for each of its calls."""
    now = [0.0]

    def compiled(self: Loop, calls: int) -> Any:
        def run() -> None:
            now[0] += 3.0 + cost * calls

        return run

    monkeypatch.setattr(Loop, "compiled", compiled)
    monkeypatch.setattr(device_timing.time, "perf_counter", lambda: now[0])
    found = measure(Loop(lambda i, c, g: c, None, None))
    assert found.seconds == found.host_seconds == pytest.approx(cost)
    assert found.clock == HOST


@pytest.mark.parametrize(("share", "clock"), [(0.9, DEVICE), (0.01, HOST), (0.0, HOST)])
def test_a_device_clock_that_misses_kernels_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, share: float, clock: str
) -> None:
    counts: list[int] = []

    def compiled(self: Loop, calls: int) -> Any:
        return lambda: counts.append(calls)

    def seconds(per_call: float) -> Any:
        def clocked(run: Any) -> float:
            run()
            return 1.0 + per_call * counts[-1]

        return clocked

    monkeypatch.setattr(Loop, "compiled", compiled)
    monkeypatch.setattr(device_timing, "has_cupti", lambda: True)
    monkeypatch.setattr(device_timing, "_host_seconds", seconds(0.01))
    monkeypatch.setattr(device_timing, "_device_seconds", seconds(0.01 * share))
    found = measure(Loop(lambda i, c, g: c, None, None))
    assert found.clock == clock
    assert found.host_seconds == pytest.approx(0.01)
    assert found.seconds == pytest.approx(0.01 * share if clock == DEVICE else 0.01)


def test_batches_have_blocks_of_their_own() -> None:
    rows = [Row(33), Row(5, direction=RIGHT), Row(40, 10, kind=HIDDEN)]
    batch = inputs.make_batch(rows, 16, 20, np.random.default_rng(0))
    batch.validate()
    assert len(np.unique(batch.tables)) == batch.tables.size
    assert batch.token_row.tolist() == [0, 1] + [2] * 10
    assert batch.query_start.tolist() == [0, 1, 2]
    assert int(batch.num_decodes) == 2 and batch.kind.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="blocks: 3 rows need 18, got 17"):
        inputs.make_batch(rows, 16, 17, np.random.default_rng(0))


def test_pools_are_poisoned_where_nobody_wrote() -> None:
    heads, rows = Heads(2, 2, 4), [Row(3, direction=RIGHT), Row(2, kind=HIDDEN)]
    rng = np.random.default_rng(0)
    batch = inputs.make_batch(rows, 4, 5, rng)
    pool = inputs.poisoned_pool(heads, 2, 5, 4, jnp.dtype("float32"), batch, rng)
    written = np.isfinite(np.asarray(pool)).all(axis=(0, 2, 4))  # [blocks, slots]
    (k, v), (x, _) = np.asarray(batch.tables)[:, :, 0]
    assert written.sum() == 3 + 3 + 2
    assert written[k].tolist() == written[v].tolist() == [False, True, True, True]
    assert written[x].tolist() == [True, True, False, False]
