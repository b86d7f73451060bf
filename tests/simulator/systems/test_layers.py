"""A layer's work beside attention, and the figures that say how fast devices get through it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched.cost.hardware import DEVICES
from jaxserve.sched.cost.model_shapes import MODELS
from jaxserve.simulator.systems.layers import FIGURES, Figures, LayerWork, figures_of
from jaxserve.simulator.systems.systems import scale

ROOT = Path(__file__).parents[3]
KNOWN = json.loads(FIGURES.read_text(encoding="utf-8"))
EXACT = Figures(1e-5, 0.5, 0.5, 0.25, 0.5, {2: 1e-6, 4: 3e-6, 8: 5e-6})


def test_the_work_of_a_layer() -> None:
    """Llama-2-7B: 4,096 wide, 11,008 in the feed-forward, 32 heads of 128."""
    alone = LayerWork.from_model(MODELS["llama-2-7b"], 1)
    matrices = 4 * 4096**2 + 3 * 4096 * 11008
    assert (alone.weights, alone.flops) == (2 * matrices, 2 * matrices)
    assert alone.elementwise == 2 * (7 * 4096 + 2 * 64 * 128 + 3 * 11008)
    assert alone.exchanged == 0
    half = LayerWork.from_model(MODELS["llama-2-7b"], 2)
    assert half.weights == matrices
    assert half.elementwise == 2 * 7 * 4096 + (2 * 64 * 128 + 3 * 11008)
    # Two all-reduces of a hidden vector; in a ring of two, each device sends all of it once.
    assert half.exchanged == 2 * 2 * 4096
    assert LayerWork.from_model(MODELS["llama-2-7b"], 8).exchanged == 2 * 2 * 4096 * 7 / 4


def test_opt_rotates_nothing_and_has_no_gate() -> None:
    work = LayerWork.from_model(MODELS["opt-13b"], 1)
    assert work.elementwise == 2 * (7 * 5120 + 2 * 20480)


def test_seconds_of_a_step_and_of_a_token() -> None:
    device = replace(DEVICES["a100"], flops=1e12, bandwidth=1e9, link=1e6)
    work = LayerWork(weights=5e8, flops=1e9, elementwise=1e3, exchanged=1e3)
    step, token = EXACT.seconds(work, device)
    assert step == pytest.approx(1e-5 + 1.0)
    assert token == pytest.approx(2e-3 + 4e-6 + 2e-3)
    step, _ = EXACT.seconds(work, replace(device, count=4))
    assert step == pytest.approx(1e-5 + 1.0 + 2 * 3e-6)


@pytest.mark.parametrize(
    ("devices", "latency"), [(1, 0.0), (2, 1e-6), (3, 2e-6), (6, 4e-6), (8, 5e-6), (64, 5e-6)]
)
def test_latency_between_and_beyond_the_measured_numbers(devices: int, latency: float) -> None:
    assert EXACT.latency(devices) == pytest.approx(latency)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_says_whose_figures_it_has(name: str) -> None:
    device = DEVICES[name]
    figures = figures_of(device.kind)
    for share in (figures.read, figures.matmul, figures.elementwise, figures.link):
        assert 0 < share <= 1
    about = scale(MODELS["opt-1.3b"], device).about
    assert about["figures_of"] == device.kind
    if name in KNOWN["devices"]:
        assert device.measured and device.kind == name
        assert about["source"] == "measured tables (Vidur, MIT)"
    else:
        assert not device.measured
        assert about["source"] == "specification"


def test_the_figures_say_where_they_come_from() -> None:
    assert "vidur" in KNOWN["origin"].lower()
    assert "MIT" in KNOWN["licence"]
    page = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    assert KNOWN["licence"].split("MIT, ")[1] in page
    for row in KNOWN["errors"]:
        cells = [
            " / ".join(f"{row[name][key]:.0%}" for key in ("mean", "octaves", "worst"))
            for name in ("assumed", "fitted")
        ]
        assert f"| {row['kind']} | {row['devices']} | {' | '.join(cells)} |" in page
        assert row["fitted"]["octaves"] < row["assumed"]["octaves"]
    for name in DEVICES:
        assert f"`{name}`" in page


@given(
    name=st.sampled_from(sorted(MODELS)),
    kind=st.sampled_from(sorted(DEVICES)),
    count=st.sampled_from([1, 2, 4, 8]),
)
def test_more_devices_never_take_longer_for_many_tokens(name: str, kind: str, count: int) -> None:
    """For a few, the exchange may cost more than the share saves."""
    model, device = MODELS[name], DEVICES[kind]
    one, _ = figures_of(device.kind).seconds(LayerWork.from_model(model, 1), device)
    many = replace(device, count=count)
    step, token = figures_of(device.kind).seconds(LayerWork.from_model(model, count), many)
    assert step > 0 and token > 0
    assert step <= one + 2 * figures_of(device.kind).latency(count)
