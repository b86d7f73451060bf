"""The GPU bench's parts at toy size on the CPU; the command itself needs a GPU and says so."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.bench import cli
from jaxserve.models.quantized import quantized_dot
from jaxserve.pallas_kernels import backends, grouped_matmul
from jaxserve_lab.bench.kernels import device_timing, gpu, gpu_report, kernel_inputs, mixtures
from jaxserve_lab.bench.kernels.end_to_end import Load, StepSize, decode_steps
from jaxserve_lab.bench.kernels.gpu_outcome import Outcome, Plan
from jaxserve_lab.bench.kernels.gpu_rivals import Trial
from jaxserve_lab.bench.kernels.kernel_cases import Workload
from jaxserve_lab.bench.kernels.kernel_checks import (
    Check,
    check_kernels,
    check_paged,
    relative_error,
    wrong_share,
)
from jaxserve_lab.bench.kernels.kernel_inputs import Heads
from jaxserve_lab.bench.kernels.kernels import Ceilings, Measured
from jaxserve_lab.bench.kernels.products import check_products

SMALL, GROUPED = Heads(2, 2, 16), Heads(4, 2, 16)
ABOUT: dict[str, Any] = {"date": "2000-01-01", "versions": {"jax": "0"}, "machine": {}}
SECTIONS = (
    *("checks", "kernels", "products", "mixtures", "attention by others"),
    *("step 1", "step 2", "throughput"),
)
TOY = Plan(
    backend="xla",
    dtypes=("float32",),
    shapes=(SMALL,),
    models=("tiny",),
    workload=Workload(
        rows=2, context=20, prefill=24, moves=6, layers=2, block_size=16, dtype="float32"
    ),
    matrix=64,
    caches=("int8",),
    formats=("int8", "int4", "Q4_1"),
    rows=(2,),
    contenders=("library",),
    many_rows=(3,),
    steps=(
        StepSize("tiny", rows=2, context=16, dtype="float32"),
        StepSize("tiny", rows=2, context=16, quantization="int8", cache="int8"),
    ),
    mixtures=("mix",),
    tokens=(1, 3),
    rivals=("xla", "mosaic-gpu"),
    load=Load("tiny", requests=2, input_len=8, output_len=4, dtype="float32", batch_tokens=16),
)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gpu"]) == 1
    assert capsys.readouterr().err == (
        "jaxserve bench gpu: there is no GPU here; jax sees cpu only\n"
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--minutes=0", "--minutes must be positive, got 0.0"),
        ("--sections=checks,speed", "--sections: known are checks, kernels, products"),
        ("--markdown=/no/such/gpu.md", "--markdown: there is no folder /no/such"),
        ("--json_file=/no/such/gpu.json", "--json_file: there is no folder /no/such"),
    ],
)
def test_a_wrong_flag_is_explained_before_anything_is_measured(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.parse([flag])
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Everything, at toy size."""
    known = kernel_inputs.model_config
    tiny = known("mixtral-8x7b")
    assert tiny.experts is not None
    experts = dataclasses.replace(tiny.experts, d_ff=32)
    mix = dataclasses.replace(
        tiny, vocab_size=32, d_model=64, num_heads=4, num_kv_heads=2, experts=experts, head_dim=16
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_timing, "MOST", 3)
        patch.setattr(
            kernel_inputs, "model_config", lambda name: mix if name == "mix" else known(name)
        )
        return gpu.run(TOY, lambda text: None)


@pytest.mark.slow
def test_every_section_runs(outcome: Outcome) -> None:
    assert list(outcome.seconds) == list(SECTIONS)
    assert outcome.failed == [] and outcome.left_out == [] and outcome.broken == {}
    formats = {f"product, {name}" for name in TOY.formats}
    formats |= {f"product by library, {name}" for name in TOY.formats[:2]}  # not with minimums
    assert {check.kernel for check in outcome.checks} == formats | {
        "product by group",
        "decode attention",
        "decode attention, window and cap",
        "prefill attention",
        "attention with sinks",
        "attention with drafts",
        "absorbed",
        "projected decode",
        "projected prefill",
        "write",
        "move",
        "stage out",
        "stage in",
    }
    kv, hidden, small = outcome.steps
    assert [one.shape for one in outcome.mixtures] == ["1 x 64 x 32, 2 of 8", "3 x 64 x 32, 2 of 8"]
    assert (kv.cache, hidden.cache) == ("KV, float32", "hidden, absorbed, float32")
    assert (small.weights, small.cache) == ("int8", "KV, int8")
    assert kv.floor_bytes > hidden.floor_bytes > small.floor_bytes > 0
    assert kv.floor_bytes > 3 * small.floor_bytes
    assert [one.dtype for one in outcome.products] == ["float32", *TOY.formats]
    assert [(one.kernel, one.dtype) for one in outcome.contended] == [
        ("up and down by library", name) for name in TOY.formats[:2]
    ]
    assert [one.dtype for one in outcome.kernels][-3:] == ["float32", "int8", "int8"]
    assert outcome.load["output_tokens_per_s"]["median"] > 0
    assert json.loads(json.dumps(gpu.as_json(TOY, outcome)))["outcome"]["device"] == "cpu"


@pytest.mark.slow
def test_the_page_has_what_was_measured(outcome: Outcome) -> None:
    page = gpu_report.page(TOY, outcome, ABOUT)
    parts = (
        "| tiny | absorbed hidden decode |",
        "2 x 20",
        "| Q4_1 |",
        "| int8 | KV, int8 |",
        "2 of 8 |",
    )
    for part in ("on cpu, 2000-01-01, jax 0", *parts):
        assert part in page
    assert f"{len(outcome.checks)} checks" in page


@pytest.mark.slow
def test_other_backends_are_tried_before_anybody_serves_with_them(outcome: Outcome) -> None:
    *ran, refused, _, _ = outcome.trials
    assert {(one.backend, one.model, one.wrong) for one in ran} == {("xla", "tiny", 0)}
    kernels = ["decode attention", "decode attention, int8", "prefill attention"]
    assert [one.kernel for one in ran] == kernels
    own = {(one.kernel, one.dtype): one.seconds for one in outcome.kernels}
    decode, int8, prefill = (one.own for one in ran)
    assert decode == own["decode attention", "float32"]
    assert int8 == own["decode attention", "int8"]
    assert prefill == own["prefill attention", "float32"]
    assert refused.why == "backend: mosaic-gpu needs a gpu, this is a cpu"
    page = gpu_report.page(TOY, dataclasses.replace(outcome, trials=[refused]), ABOUT)
    assert "not run: backend: mosaic-gpu needs a gpu" in page


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (
            Trial("m", "decode attention", "b", wrong=2, seconds=1.0, own=2.0),
            "**wrong** in 2 checks",
        ),
        (
            Trial("m", "decode attention", "b", seconds=1.0, own=1.5),
            "1.50 times as fast: `--config.engine.attention_backend=b`",
        ),
        (Trial("m", "decode attention", "b", seconds=2.0, own=1.0), "0.50 times as fast: stay"),
        (Trial("m", "decode attention", "b", seconds=0.0, own=1.0), "not compared"),
        (Trial("m", "decode attention", "b", seconds=1.0), "not compared"),
    ],
)
def test_what_is_wrong_or_slower_is_not_recommended(trial: Trial, said: str) -> None:
    assert trial.verdict.startswith(said)


@pytest.mark.slow
def test_a_kernel_that_the_clock_did_not_see_meets_no_target(outcome: Outcome) -> None:
    """Differences of two noisy times may be 0."""
    unseen = [dataclasses.replace(one, seconds=0.0) for one in outcome.kernels]
    targets = gpu_report.targets(dataclasses.replace(outcome, kernels=unseen))
    assert [text for text, _, _ in targets if "products" not in text] == [
        "tiny, float32, KV, float32: decode step of 2 within 1.25 of its byte floor",
        "tiny, int8, KV, int8: decode step of 2 within 1.25 of its byte floor",
    ]
    seen = [dataclasses.replace(one, seconds=1.0) for one in outcome.kernels]
    assert len(gpu_report.targets(dataclasses.replace(outcome, kernels=seen, products=[]))) == 7


def test_sections_without_time_are_left_out() -> None:
    late = gpu.run(Plan(minutes=-1.0, steps=TOY.steps), lambda text: None)
    assert late.left_out == list(SECTIONS)
    page = gpu_report.page(Plan(), late, ABOUT)
    assert page.count("Not run.") == 4 and "Left out for lack of time: checks" in page


def test_sections_can_be_named() -> None:
    late = gpu.run(Plan(minutes=-1.0), lambda text: None, ["throughput", "step 3"])
    assert late.left_out == ["step 3", "throughput"]


def test_a_section_that_fails_does_not_take_the_others_along() -> None:
    missing = dataclasses.replace(
        TOY,
        dtypes=(),
        formats=(),
        models=(),
        mixtures=("opt-125m",),
        steps=(StepSize("opt-14b"),),
        load=Load("tiny", requests=0),
    )
    found = gpu.run(missing, lambda text: None)
    assert found.ceilings is not None
    assert "'opt-14b' is not known" in found.broken["step 1"]
    assert "'opt-125m' has no experts" in found.broken["mixtures"]
    assert list(found.broken) == ["mixtures", "step 1", "throughput"]
    assert "**step 1** ended early: ValueError" in gpu_report.page(missing, found, ABOUT)


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the wrong layer."""
    right = backends.get_backend("xla")

    def wrong(q: Any, pool: Any, layer: Any, batch: Any, **options: Any) -> Any:
        return right.attend(q, pool, 0 * layer, batch, **options)

    broken = backends.Backend(**{**vars(right), "attend": wrong})
    monkeypatch.setattr("jaxserve.pallas_kernels.attention.get_backend", lambda name: broken)
    found = list(check_kernels("xla", ("float32",), (SMALL,)))
    assert [one.passed for one in check_paged("xla", ("float32",), (SMALL,))] == [False] * 3
    bad = {check.kernel for check in found if not check.passed}
    decodes = {"decode attention", "decode attention, window and cap"}
    assert bad == decodes | {
        "prefill attention",
        "attention with sinks",
        "attention with drafts",
    }


def test_bfloat16_is_held_to_its_own_limit() -> None:
    found = list(check_kernels("xla", ("bfloat16",), (GROUPED,)))
    assert found and all(check.passed for check in found)
    assert max(check.error for check in found) > 1e-5


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_pools_of_8_bits_are_checked(dtype: str) -> None:
    found = list(check_kernels("xla", (dtype,), (GROUPED,)))
    assert len(found) == 9 and all(check.passed for check in found)


def test_scales_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slot that moves, or is written."""
    right = backends.get_backend("xla")

    def keep(scales: jax.Array, *given: Any) -> jax.Array:
        return scales

    stay = right.scales._replace(move=keep, write=keep)
    broken = dataclasses.replace(right, scales=stay)
    for module in ("attention", "move"):
        monkeypatch.setattr(f"jaxserve.pallas_kernels.{module}.get_backend", lambda name: broken)
    found = check_kernels("xla", ("int8",), (GROUPED,))
    assert {check.kernel for check in found if not check.passed} == {"write", "move"}


def test_a_wrong_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without the minimums of its groups."""

    def wrong(x: jax.Array, weights: Any, **options: Any) -> jax.Array:
        return quantized_dot(x, dataclasses.replace(weights, minimum=None), **options)

    monkeypatch.setattr("jaxserve_lab.bench.kernels.products.quantized_dot", wrong)
    found = list(check_products(("int8", "Q4_1"), ("bfloat16",), (2,)))
    assert [check.passed for check in found] == [True, False]


def test_a_wrong_product_by_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose groups begin a row late."""

    def wrong(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return grouped_matmul(x, weights, sizes.at[0].add(1))

    monkeypatch.setattr(mixtures, "grouped_matmul", wrong)
    assert not any(check.passed for check in mixtures.check_mixtures(("bfloat16",)))


def test_errors_are_counted() -> None:
    want = np.array([3.0, 4.0])
    assert relative_error(jnp.asarray([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(jnp.asarray([3.0, jnp.nan]), want) == float("inf")
    assert relative_error(jnp.asarray([3.0, 4.0]), np.array([3.0, np.nan])) == float("inf")
    assert relative_error(jnp.asarray([3.0, jnp.nan]), np.array([2.0, np.nan])) == 0.5
    assert wrong_share(jnp.asarray([3.0, jnp.nan]), np.array([3.0, np.nan])) == 0
    assert wrong_share(jnp.asarray([3.0, 4.0]), np.array([3.0, np.nan])) == 0.5


@pytest.mark.slow
def test_hidden_and_kv_steps_compute_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a first token: the cache holds nothing but what the step itself wrote. Its tables are as
    wide as TOY's, and so the compiled steps are the same."""
    logits: list[jax.Array] = []
    monkeypatch.setattr(
        "jaxserve_lab.bench.kernels.end_to_end._greedy",
        lambda given: logits.append(given) or jnp.ones(len(given), jnp.int32),
    )
    decode_steps(StepSize("tiny", rows=2, context=1, dtype="float32"), "xla", 1e9)
    kv, hidden = logits[0], logits[len(logits) // 2]
    np.testing.assert_allclose(kv, hidden, rtol=1e-4, atol=1e-4)


def test_targets_are_judged() -> None:
    def kernel(name: str, seconds: float, copy: float, matmul: float) -> Measured:
        about = ("m", name, "s", "bfloat16", "triton")
        return Measured(*about, seconds, "c", seconds, 1.0, 1.0, copy, matmul)

    found = Outcome("h200", ceilings=Ceilings(1.0, 1.0))
    found.kernels = [
        kernel("decode attention", 1.0, 0.9, 0.0),
        kernel("prefill attention", 1.0, 0.0, 0.4),
        kernel("absorbed hidden decode", 1.3, 0.5, 0.0),
    ]
    found.products = [kernel("up and down", seconds, 0.5, 0.5) for seconds in (1.0, 1.5)]
    found.products[1] = dataclasses.replace(found.products[1], dtype="int4")
    found.checks = [Check("write", "s", "float32", 0.5, 0.0), Check("hidden", "s", "f", 0, 0, "no")]
    assert [row[1:] for row in gpu_report.targets(found)] == [
        ("90.0%", "met"),
        ("40.0%", "**missed**"),
        ("1.30", "**missed**"),
        ("1.50", "**missed**"),
    ]
    assert found.failed == found.checks[:1]
    assert "**wrong**: write" in gpu_report.page(Plan(), found, ABOUT)
