"""Whatever is wrong with a profile is one line that names the file and the field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.profiles import MOST, System, UnknownSystem, load
from jaxserve.simulator.simulator import simulate
from jaxserve.simulator.workloads.workload import Lengths, Workload, all_at_once, fixed_lengths

GOOD = System(
    "tiny@cpu",
    LinearCostModel(Coefficients(1e-6, 2e-5, 3e-9, 0, 0, 1e-10, 0, 0, 0), 4),
    4096,
    64,
    32,
    8,
    16,
    padding=Padding((1, 8), (16, 64), decode_group=8, decode_chunk=64),
    host=HostOverhead(plan=1e-4),
    about={"device": "cpu"},
    rho=-1e-9,
)


def content(tmp_path: Path) -> dict[str, Any]:
    GOOD.save(tmp_path / "good.json")
    found: dict[str, Any] = json.loads((tmp_path / "good.json").read_text())
    return found


def refused(tmp_path: Path, broken: Any) -> str:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    with pytest.raises(UnknownSystem) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("kv_tokens", "many", "kv_tokens must be a whole number, got 'many'"),
        ("kv_tokens", 10**30, "kv_tokens must be a whole number"),
        ("kv_tokens", 4096.0, "got 4096.0"),
        ("max_batch_tokens", None, "max_batch_tokens must be a whole number"),
        ("max_prefill_tokens", True, "max_prefill_tokens must be a whole number"),
        ("max_rows", 0, "max_rows must be a whole number from 1"),
        ("block_size", 0, "block_size must be a whole number from 1"),
        ("num_layers", 0, "num_layers must be"),
        ("num_layers", [4], "num_layers must be"),
        ("name", 7, "name must be a text"),
        ("about", "a laptop", "about must be a JSON object"),
        ("rho", "much", "rho must be a number"),
        ("rho", float("nan"), "rho must be a number"),
        ("padding", {}, "padding.rows is missing"),
        ("padding", [], "padding must be a JSON object"),
        ("padding.rows", [], "padding.rows must be positive and ascending"),
        ("padding.rows", 8, "padding.rows must be a list"),
        ("padding.rows", ["8"], "padding.rows must be a whole number"),
        ("padding.tokens", [64, 16], "padding.tokens must be positive and ascending"),
        ("padding.decode_group", 0, "padding.decode_group must be"),
        ("padding.decode_chunk", 0, "padding.decode_chunk must be"),
        ("seconds_per_layer", {"per_token": 1.0}, "seconds_per_layer.token_bias is missing"),
        ("seconds_per_layer.per_token", None, "seconds_per_layer.per_token must be a number"),
        ("seconds_per_layer.per_token", -1, "coefficient per_token must be 0 or more"),
        ("seconds_per_layer.token_bias", 1e300, "a step of one token takes"),
        ("seconds_per_layer.gap", 1.0, "'seconds_per_layer.gap' is not a field"),
        ("host_s.plan", "slow", "host_s.plan must be a number"),
        ("host_s.plan", -1.0, "host.plan must be 0 or more"),
        ("gap_s", 1.0, "'gap_s' is not a field"),
        ("overlapped", "yes", "overlapped must be true or false, got 'yes'"),
        ("projects", 1, "projects must be true or false, got 1"),
        ("format", 4, "format 4, this version reads 5"),
    ],
)
def test_the_field_is_named(tmp_path: Path, path: str, value: Any, problem: str) -> None:
    broken = content(tmp_path)
    *outer, last = path.split(".")
    at = broken
    for name in outer:
        at = at[name]
    at[last] = value
    assert problem in refused(tmp_path, broken)


def test_steps_that_take_no_time_are_refused(tmp_path: Path) -> None:
    broken = content(tmp_path)
    broken["seconds_per_layer"] = dict.fromkeys(broken["seconds_per_layer"], 0.0)
    assert "a step of one token takes 0 s" in refused(tmp_path, broken)
    with pytest.raises(ValueError, match="takes 0 s"):
        System("still", LinearCostModel(Coefficients(0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0), 1), 100)


@pytest.mark.parametrize("field", [*GOOD.__dict__, "format"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    broken = content(tmp_path)
    if field not in broken or field == "rho":
        return  # of the dataclass alone, or may be left out
    del broken[field]
    assert f"({field} is missing)" in refused(tmp_path, broken)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "\x00", "3", '"a"', "null", "[1, 2]"])
def test_what_is_no_object_at_all(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(UnknownSystem, match=r"x\.json: No such file"):
        load(path)
    path.write_text(text)
    with pytest.raises(UnknownSystem, match=r"not a system profile"):
        load(path)


junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([MOST, MOST + 1, 10**400, -(10**30)])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
WORKLOAD = Workload.create(all_at_once(4), Lengths(*(fixed_lengths(5, 3, 4).prompt_len,) * 2))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_corrupted_profile_is_refused_or_works(tmp_path: Path, data: st.DataObject) -> None:
    broken = copy.deepcopy(content(tmp_path))
    for _ in range(data.draw(st.integers(1, 2))):
        at: Any = broken
        while isinstance(at, dict) and at:
            key = data.draw(st.sampled_from(sorted(at)))
            inside = isinstance(at[key], dict) and at[key] and data.draw(st.booleans())
            if not inside:
                what = data.draw(st.sampled_from(["replace", "replace", "delete", "add"]))
                if what == "delete":
                    del at[key]
                else:
                    at[key + "_" if what == "add" else key] = data.draw(junk)
                break
            at = at[key]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    try:
        place = load(path)
    except UnknownSystem as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return
    try:
        summary = simulate("vllm", WORKLOAD, place).summary()
    except ValueError:
        return  # too small a cache or batch for the workload
    assert summary["output_tokens"] == 20 and 0 < summary["latency_s"] < float("inf")
