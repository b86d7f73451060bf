"""Measuring a running engine, and predicting it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxserve.commands import profile
from jaxserve.config import Config
from jaxserve.engine.startup import step_profile
from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients
from jaxserve.sched.cost.cost_model_fit import Sample, columns
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.profiles import load
from jaxserve_lab.bench import fidelity
from tests.engine.harness import write_shape


def tiny(folder: Path) -> Config:
    return Config().with_fields(
        model__path=str(write_shape(folder, "llama")),
        model__load_format="random",
        cache__block_size=4,
        cache__num_blocks=256,
        scheduler__max_batch_tokens=32,
        scheduler__max_prefill_tokens=32,
        scheduler__max_rows=4,
        engine__row_buckets=(4, 32),
        engine__token_buckets=(32,),
        engine__compilation_cache_dir="",
    )


@pytest.mark.parametrize("max_len", [8, 50, 4096])
def test_the_shapes_are_ones_that_the_engine_can_run(max_len: int) -> None:
    padding = Padding((1, 2, 4, 8), (16, 32, 64))
    limits: dict[str, int] = {"max_rows": 8, "max_prefill": 64, "max_len": max_len}
    found = profile.shapes(padding, **limits, hidden=True, swaps=True)
    assert len(found) == len(set(found)) > 10
    for shape in found:
        assert len(shape.decodes) + len(shape.chunks) <= 8
        assert shape.tokens <= 64
        assert all(1 <= before < max(max_len, 2) for before in shape.decodes)
        assert all(count >= 1 and count + before <= max_len for count, before in shape.chunks)
        assert shape.projected <= max_len
    assert any(not s.chunks for s in found) and any(not s.decodes for s in found)
    assert set(step_profile.shapes(padding, **limits, hidden=True, swaps=True)) <= set(found)


@pytest.mark.parametrize("hidden", [True, False])
def test_every_feature_of_a_step_is_measured(hidden: bool) -> None:
    padding = Padding((1, 2, 4, 8), (16, 32, 64))
    found = profile.shapes(
        padding, max_rows=8, max_prefill=64, max_len=200, hidden=hidden, swaps=hidden
    )
    design = np.array([columns(shape.features(padding)) for shape in found])
    names = [name for name in Coefficients.__dataclass_fields__ if name != "per_expert"]
    seen = dict(zip(names, (design > 0).any(axis=0), strict=True))
    never = {name for name, there in seen.items() if not there}
    only = {"hidden_token", "hidden_prefill", "projected_token", "swapped_slot"}
    # Steps with adapters are learned as they are served.
    assert never == {"copied_slot", "adapted_token"} | (set() if hidden else only)
    several = {name for name in seen if len(set(design[:, list(seen).index(name)].tolist())) > 1}
    assert several >= seen.keys() - never - {"token_bias"}


def test_a_profile_is_measured_fitted_and_used(tmp_path: Path) -> None:
    """Of a pool that is smaller than the longest request."""
    engine = profile.build(tiny(tmp_path).with_fields(cache__num_blocks=16), progress=False)
    try:
        assert engine.info().pool_tokens == 32 < engine.info().max_model_len
        system, found, samples = profile.profile_engine(engine)
        assert len(samples) >= 10
        assert all(np.isfinite(s.seconds) and s.seconds > 0 for s in samples)
        assert system.padding == Padding((4,), (32,), decode_group=1, decode_chunk=4)
        assert (system.max_rows, system.max_prefill_tokens, system.block_size) == (4, 32, 4)
        assert system.about["r2"] == found.r2
        host = profile.measure_host(engine, system)
        assert 0 < host.plan + 4 * host.plan_row < 1
        assert 0 < host.launch + 4 * host.launch_row < 1
        assert 0 < host.finish + 4 * host.finish_row < 1
        measured = dataclasses.replace(system, host=host)
        measured.save(tmp_path / "tiny.json")
        assert load(tmp_path / "tiny.json") == measured
        flat = load(tmp_path / "tiny.json").about["pivot"]
        assert 1 <= flat["tokens"] <= flat["largest"] == 32 and flat["seconds"] > 0
        report = profile.report(measured, len(samples))
        assert "R^2" in report and f"flat from {flat['tokens']} tokens" in report
    finally:
        engine.stop()


def sample(
    tokens: int, seconds: float, *, decodes: int = 0, before: int = 0, sampled: int = 0
) -> Sample:
    step = BatchFeatures(tokens, tokens, 0, decodes, 0, 1, before, sampled_rows=sampled)
    return Sample(step, seconds)


def test_the_pivot_is_where_throughput_was_measured_to_flatten() -> None:
    """100, 160, 192 and 200 tokens a second; the shorter of two times counts."""
    curve = [sample(100, 1.0), sample(160, 1.0), sample(192, 1.5), sample(192, 1.0)]
    curve.append(sample(400, 2.0))
    others = [sample(50, 0.1, decodes=1), sample(50, 0.1, before=9), sample(50, 0.1, sampled=4)]
    found = {"tokens": 192, "seconds": 1.0, "largest": 400}
    assert profile.pivot([*others, *curve]) == found
    with pytest.raises(ValueError, match="no step of prompts alone"):
        profile.pivot(others)


def test_an_output_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "build", lambda *args, **kwargs: pytest.fail("it began"))
    assert profile.main([f"--out={tmp_path / 'none' / 'a.json'}"]) == 2
    assert capsys.readouterr().err == (
        f"jaxserve profile: --out: there is no folder {tmp_path / 'none'}\n"
    )


def test_fidelity_compares_prediction_and_measurement(tmp_path: Path) -> None:
    asked = {"num_requests": 4, "seed": 0, "repeats": 2}
    result = fidelity.run(tiny(tmp_path), rate=50.0, **asked)
    rows = result["loads"]
    assert [row["load"] for row in rows][-2:] == ["mixed, 50 requests/s", "chats, 200 requests/s"]
    assert len(rows) == 7
    for row in rows:
        for name in fidelity.MEASURES:
            predicted, measured = row["predicted"][name], row["measured"][name]
            first, second = (one[name] for one in row["repeats"])
            assert predicted > 0 and measured > 0
            assert measured == pytest.approx((first + second) / 2)
            assert row["error"][name] == pytest.approx(abs(predicted - measured) / measured)
            assert row["scatter"][name] == pytest.approx(abs(first - second) / 2 / measured)
            if row["verdict"][name] == fidelity.MISSED:
                assert row["error"][name] > max(0.08, row["scatter"][name])
            elif row["verdict"][name] == fidelity.WITHIN:
                assert 0.08 < row["error"][name] <= row["scatter"][name]
            else:
                assert row["error"][name] <= 0.08
        # No load's own steps are among those that predict it.
        fitted = int(row["system"]["source"].split()[2])
        assert row["steps"] > 0 and fitted == result["steps"] - row["steps"]
    assert sum(row["steps"] for row in rows) < result["steps"], "some were to warm up"
    found = result["summary"]["total_s"]
    errors = [row["error"]["total_s"] for row in rows]
    assert found["mean_error"] == pytest.approx(np.mean(errors))
    assert found["worst_error"] == max(errors)
    told = fidelity.text(result)
    assert f"{found['worst_error']:.1%}" in told
    verdicts = [one["verdict"][m] for one in rows for m in fidelity.MEASURES]
    verdicts += [one["verdict"] for one in result["summary"].values()]
    for verdict in (fidelity.WITHIN, fidelity.MISSED):
        assert told.count(f"  {verdict}") == verdicts.count(verdict)


def test_a_target_is_missed_beyond_the_scatter_only() -> None:
    zero = dict.fromkeys(fidelity.MEASURES, 0.0)

    def verdict(total: float, scatter: float) -> str:
        rows = [
            {"error": zero | {"total_s": total}, "scatter": zero | {"total_s": scatter}},
            {"error": zero, "scatter": zero},
        ]
        return str(fidelity._summary(rows)["total_s"]["verdict"])

    met, within, missed = fidelity.MET, fidelity.WITHIN, fidelity.MISSED
    assert verdict(0.05, 0.0) == met, "3% mean"
    assert verdict(0.07, 0.0) == missed
    assert verdict(0.07, 0.07) == within
    assert verdict(0.5, 0.49) == missed
    assert verdict(0.12, 0.12) == within and verdict(0.12, 0.11) == missed
