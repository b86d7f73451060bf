"""Plans are checked in simulations, unless the policy is the product's own, which is checked
here."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sched.parameters import parameters, text_of
from jaxserve.sched.plan import BatchPlan, InvalidPlan
from jaxserve.sched.policy import Limits, Policy, View
from jaxserve.sched.registry import (
    _REGISTRY,
    full_name,
    is_built_in,
    make_policy,
    policies,
    register,
    variants,
)
from jaxserve.sched.state.request_table import State
from jaxserve.simulator import dispatch
from jaxserve.simulator.results import SimulationResult
from jaxserve.simulator.simulate import cli as command
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.workload import Lengths, Workload
from tests.simulator.grouped import simulate

OPT = system("opt-13b@a100-40g")
# What a search finds is one of these, or in `test_oracle.py`.
OWN = [name for name in policies() if is_built_in(name) and name != "oracle"]
# The variants of one of each kind: with a key, with what lapses, with neither, with expectations.
BASES = ("vllm", "edf", "priority", "infermax")
NAMES = OWN + [f"{name}+{suffix}" for name in BASES for suffix in variants()]


class Greedy(Policy):
    """Everybody at once, whatever C, the rows and the pool say."""

    chunked = False

    def plan(self, view: View, now: float) -> BatchPlan:
        table = view.table
        rows = np.append(table.in_state(State.RUNNING), table.in_state(State.WAITING))
        tokens = table.pending(rows)
        return BatchPlan(rows, tokens, table.computed[rows] + tokens, np.zeros_like(rows))


GREEDY_FILE = f"""
import numpy as np

from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import register
from jaxserve.sched.state.request_table import State


@register("greedy", summary="takes all there is and more", source="a test")
{inspect.getsource(Greedy)}"""


def contended(seed: int = 3, count: int = 24) -> Workload:
    """Requests of up to 200 + 60 tokens that all come within a moment."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(0.01, count))
    lengths = Lengths(rng.integers(1, 200, count), rng.integers(1, 60, count))
    return Workload.create(arrival, lengths)


def is_compiled(name: str) -> bool:
    return dispatch.has_form(make_policy(name))


def run(policy: str | Policy, workload: Workload, **options: Any) -> SimulationResult:
    asked = {"kv_tokens": 640, "host_tokens": 64, "limits": Limits(400, 64, 12), **options}
    return simulate(policy, workload, OPT, **asked)


@pytest.mark.parametrize("name", NAMES)
def test_the_plans_of_our_own_policies_can_be_booked(name: str) -> None:
    workload = contended(1)
    checked = run(name, workload, checked=True)
    # Compiled or not, blocks are counted only there, and named where plans are checked.
    for compiled in (False, True) if is_compiled(name) else (False,):
        usual = run(name, workload, compiled=compiled)
        np.testing.assert_array_equal(checked.requests.token_times, usual.requests.token_times)
        np.testing.assert_array_equal(checked.batches.kv_used, usual.batches.kv_used)


def test_the_workload_is_contended() -> None:
    assert run("sarathi", contended(1)).summary()["num_preemptions"] > 0
    hidden = run("aptserve", contended(1)).batches.num_hidden
    assert hidden.any()


VALUES: dict[type, Any] = {
    bool: st.booleans(),
    int: st.integers(1, 12),
    float: st.sampled_from([0.0, 0.005, 0.1, 0.5, 1.0, 2.0, 8.0]),
}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_so_can_those_with_other_parameters(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(OWN))
    known = parameters(make_policy(name))
    chosen = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True, max_size=3))
    drawn = {key: data.draw(VALUES.get(known[key].kind, st.none())) for key in chosen}
    given_ = {key: text_of(value) for key, value in drawn.items() if value is not None}
    policy = full_name(name, given_)
    try:
        chunked = make_policy(policy).chunked
    except ValueError:
        return  # a value that the policy itself refuses
    limits = Limits(400, 64 if chunked else 400, 12)
    run(policy, contended(data.draw(st.integers(0, 99)), 12), limits=limits, checked=True)


@pytest.mark.parametrize(
    ("limits", "kv_tokens", "problem"),
    [
        (Limits(400, 400, 99), 640, "more tokens than max_batch_tokens"),
        (Limits(9999, 9999, 12), 9984, "more requests than max_rows"),
        (Limits(9999, 9999, 99), 640, "more blocks than are free"),
    ],
)
def test_a_users_plans_are_checked(limits: Limits, kv_tokens: int, problem: str) -> None:
    workload = contended()
    options: dict[str, Any] = {"limits": limits, "kv_tokens": kv_tokens}
    with pytest.raises(InvalidPlan, match=problem):
        simulate(Greedy(), workload, OPT, **options)


def test_a_policy_of_ours_in_a_users_hands_is_checked() -> None:
    seen: list[bool] = []

    class Watched(Greedy):
        def plan(self, view: View, now: float) -> BatchPlan:
            seen.append(True)
            return make_policy("sarathi").plan(view, now)

    run(Watched(), contended())
    assert seen
    assert not is_built_in("somewhere.py:sarathi")
    assert all(is_built_in(name) for name in ("sarathi", "sarathi+ef", "edf:watermark=0.05"))
    with pytest.raises(ValueError, match="there is no policy 'sarati'"):
        is_built_in("sarati")


def test_what_a_user_registers_is_not_built_in() -> None:
    register("greedy_here", summary="takes all", source="a test")(Greedy)
    try:
        assert not is_built_in("greedy_here")
        with pytest.raises(InvalidPlan, match="more tokens than max_batch_tokens"):
            run("greedy_here", contended())
    finally:
        del _REGISTRY["greedy_here"]


def test_over_commitment_is_one_line_even_unchecked() -> None:
    workload, limits = contended(), Limits(9999, 9999, 99)
    with pytest.raises(InvalidPlan, match=r"more blocks than are free \(\d+ blocks wanted, \d+"):
        simulate(Greedy(), workload, OPT, kv_tokens=640, limits=limits, checked=False)


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(GREEDY_FILE)
    argv = [f"--policy={tmp_path}/mine.py:greedy", "--workload=fixed:100x10x30"]
    try:
        assert command.main([*argv, "--kv_tokens=640"]) == 1
        error = capsys.readouterr().err
        assert error == f"jaxserve simulate: policy {argv[0][9:]}: more blocks than are free\n"
        assert command.main([*argv, "--max_batch_tokens=200"]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    finally:
        _REGISTRY.pop("greedy", None)
