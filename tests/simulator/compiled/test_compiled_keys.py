"""Where the compiled simulation could differ from Python: keys, cost models, and what is kept."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.sched.cost.cost_model import BatchFeatures, LinearCostModel
from jaxserve.sched.policies.infermax import InferMax
from jaxserve.sched.policy import Limits
from jaxserve.sched.registry import make_policy, policies
from jaxserve.sched.unified.policy_spec import where
from jaxserve.sched.unified.unified_policy import Group, Phase, Reserve
from jaxserve.simulator.compiled import code_cache, kernel
from jaxserve.simulator.dispatch import form_of, has_form
from jaxserve.simulator.simulator import SimulationError
from tests.simulator.compiled.test_compiled import SEVEN, assert_same, drawn, own
from tests.simulator.grouped import simulate

KEYS_AS_IN_NUMPY = {
    "a tier times much": lambda r: r.tier * 1000 + r.prompt_len,
    "a division by zero": lambda r: r.prompt_len / r.generated,
    "no number": lambda r: r.ttft - r.tbt,
    "a negation": lambda r: where(~r.waiting, 0, 1),
    "a truth": lambda r: ~(r.tier > 0),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what", KEYS_AS_IN_NUMPY)
def test_a_key_computes_as_numpy_does(what: str) -> None:
    policy, workload = own(key=KEYS_AS_IN_NUMPY[what]), drawn(5, 60, 1e4)
    options: dict[str, Any] = {"kv_tokens": 700, "limits": Limits(400, 100, 30)}
    found = [simulate(policy, workload, SEVEN, compiled=c, **options) for c in (True, False)]
    assert_same(*found)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("key", "error"),
    [
        (lambda r: r.output_len, AttributeError),  # which only an oracle knows
        (lambda r: 1 if r.waiting else 0, ValueError),
        (lambda r: r.waiting and r.tier, ValueError),
    ],
)
def test_what_a_key_may_not_do_is_refused_in_both(compiled: bool, key: Any, error: type) -> None:
    with pytest.raises(error):
        simulate(own(key=key), drawn(5, 9, 1e4), SEVEN, compiled=compiled)


@pytest.mark.parametrize("name", [name for name in policies() if has_form(make_policy(name))])
def test_a_policy_made_twice_is_compiled_once(name: str) -> None:
    once, again = (form_of(make_policy(name)) for _ in range(2))
    assert (once.key, once.lapse) == (again.key, again.lapse)


SIGN = 1


def test_a_key_sees_what_has_been_changed_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, workload = own(key=lambda r: SIGN * r.prompt_len), drawn(5, 40, 1e4)
    seen = []
    for sign in (1, -1):
        monkeypatch.setattr(sys.modules[__name__], "SIGN", sign)
        found = [
            simulate(policy, workload, SEVEN, kv_tokens=700, compiled=c) for c in (True, False)
        ]
        assert_same(*found)
        seen.append(found[0].requests.token_times)
    assert (seen[0] != seen[1]).any()


@dataclasses.dataclass(frozen=True)
class Constant(LinearCostModel):
    def batch_time(self, features: BatchFeatures) -> Any:
        return 0.01 + 0 * features.num_tokens


def test_a_cost_model_derived_from_the_products_own_counts() -> None:
    model, workload = Constant(SEVEN.cost_model.coefficients, 1), drawn(5, 9, 9.0)
    with pytest.raises(SimulationError, match="its cost model is none of the product's own"):
        simulate("edf", workload, model, kv_tokens=4000, compiled=True)
    result = simulate("edf", workload, model, kv_tokens=4000)
    assert (result.batches.duration == 0.01).all()


@given(seed=st.integers(0, 1 << 30), blocks=st.integers(100, 220), probing=st.booleans())
@example(seed=69, blocks=163, probing=True)
@example(seed=123, blocks=106, probing=True)
@settings(max_examples=5, deadline=None)
def test_chunks_of_several_prompts_in_a_small_pool(seed: int, blocks: int, probing: bool) -> None:
    """One finds no blocks for its chunk; another, whose last block is not full, may."""
    groups = (Group(Phase.DECODE, preempts=True), Group(Phase.PREFILL | Phase.WAITING))
    policy = own(groups=groups, reserve=Reserve.CHUNK, watermark=0.0, probing=probing)
    workload = drawn(seed, 70, 1e4)
    options: dict[str, Any] = {"limits": Limits(400, 70, 60), "num_blocks": blocks, "block_size": 8}
    found = [simulate(policy, workload, SEVEN, compiled=c, **options) for c in (True, False)]
    assert_same(*found)


def test_phases_that_come_twice_are_not_compiled() -> None:
    groups = (Group(Phase.WAITING), Group(Phase.DECODE, preempts=True), Group(Phase.ANY))
    for policy in (own(groups=groups), InferMax(groups=groups)):
        assert policy.compiled_spec() is None


def test_its_directory_knows_all_that_is_compiled() -> None:
    """Of the modules whose code is compiled, and of those they take constants from."""
    folder = Path(kernel.__file__).parent
    found: set[str] = set()
    for path in folder.glob("*.py"):
        if path.stem not in ("run", "setting", "jit", "kernel", "kept"):
            text = path.read_text()
            found |= set(
                re.findall(r"^from jaxserve\.sched\.(?:routing\.)?(\w+) import", text, re.M)
            )
            for names in re.findall(r"^from jaxserve\.sched\.routing import (.+)", text, re.M):
                found |= set(re.findall(r"\w+", names))
    known = set(re.findall(r"\w+", inspect.getsource(kernel._digest)))
    assert found - {"simulation", "routing"} <= known


def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not code_cache.use(blocked / "numba")
    assert code_cache.use(tmp_path / "numba" / "deep")


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_that_are_none_are_refused(seed: int) -> None:
    with pytest.raises(SimulationError, match="seed must be at least 0 and below"):
        simulate("random", drawn(5, 9, 9.0), SEVEN, seed=seed)


def test_a_large_seed_draws_lots() -> None:
    options: dict[str, Any] = {"kv_tokens": 700, "seed": 1 << 40}
    found = [
        simulate("random", drawn(5, 40, 1e4), SEVEN, compiled=c, **options) for c in (True, False)
    ]
    assert_same(*found)
