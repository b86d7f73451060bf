"""Policies, usual targets and the targets of requests inside vLLM."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from jaxserve.sched.registry import deployable
from jaxserve.sched.request import SLO, InvalidRequest, Tier
from jaxserve.vllm.settings import Settings, runnable, targets_of

USUAL = Settings(slo=SLO(ttft=2.0, tbt=0.1))


def test_a_request_keeps_usual_targets_that_it_does_not_replace() -> None:
    assert targets_of(None, USUAL) == (SLO(ttft=2.0, tbt=0.1), Tier.REALTIME)
    said = {"ttft_ms": 500, "jct_ms": 9e3, "kv_transfer_params": {}}
    assert targets_of(said, USUAL) == (SLO(ttft=0.5, tbt=0.1, jct=9.0), Tier.REALTIME)


def test_best_effort_requests_have_their_own_targets_only() -> None:
    assert targets_of({"tier": "best_effort"}, USUAL) == (SLO(), Tier.BEST_EFFORT)
    own = {"tier": "best_effort", "jct_ms": 1000}
    assert targets_of(own, USUAL) == (SLO(jct=1.0), Tier.BEST_EFFORT)


@pytest.mark.parametrize("name", ["ttft_ms", "tbt_ms", "jct_ms"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, 10**400, "5", True, [5], {}])
def test_a_wrong_target_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: must be"):
        targets_of({name: value}, USUAL)


@pytest.mark.parametrize("value", ["gold", "REALTIME", 0, ["realtime"]])
def test_a_wrong_tier_is_named(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^tier: must be realtime or best_effort, got"):
        targets_of({"tier": value}, USUAL)


def test_requests_without_any_target_are_best_effort() -> None:
    assert targets_of({}, Settings()) == (SLO(), Tier.BEST_EFFORT)
    assert targets_of({"tier": "realtime"}, Settings()) == (SLO(), Tier.REALTIME)
    assert targets_of({"tbt_ms": 5}, Settings()) == (SLO(tbt=0.005), Tier.REALTIME)
    assert targets_of({"tbt_ms": 5}, Settings(tier=Tier.BEST_EFFORT)) == (
        SLO(tbt=0.005),
        Tier.BEST_EFFORT,
    )


def test_settings_are_one_object_of_the_additional_config() -> None:
    assert Settings.read({}) == Settings()
    said = {"policy": "edf", "tbt_ms": 50, "tier": "best_effort"}
    found = Settings.read({"jaxserve": said, "other": 1})
    assert found == Settings("edf", SLO(tbt=0.05), Tier.BEST_EFFORT)


@pytest.mark.parametrize(
    "said, problem",
    [
        (5, "must be an object"),
        ({"ttft": 5}, "there is no 'ttft'. Known: policy, ttft_ms"),
        ({"policy": 5}, "policy must be a name"),
        ({"jct_ms": -5}, "jct_ms: must be more than 0"),
    ],
)
def test_wrong_settings_are_named(said: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Settings.read({"jaxserve": said})


REFUSED = {
    "aptserve": "hidden caches",
    "aptserve_fcfs": "hidden caches",
    "aptserve_s": "hidden caches",
    "bros": "fills blocks from both sides",
    "continuum": "while tools run",
    "fastserve": "moves caches to host memory",
}


@pytest.mark.parametrize("name", deployable())
def test_only_policies_that_need_what_vllm_lacks_are_refused(name: str) -> None:
    if name not in REFUSED:
        runnable(name, chunked=True, whole=True)
        return
    with pytest.raises(
        ValueError, match=f"policy '{name}' cannot run inside vLLM.*{REFUSED[name]}"
    ):
        runnable(name, chunked=True, whole=True)


@pytest.mark.parametrize(
    "name, chunked, whole, problem",
    [
        ("oracle", True, True, "knows how long outputs will be"),
        ("sarathi+spec", True, True, "plans drafts"),
        ("sarathi", False, True, "cuts prompts"),
        ("orca", True, False, "--max-num-batched-tokens of at least --max-model-len"),
        ("nobody", True, True, "there is no policy 'nobody'"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, chunked: bool, whole: bool, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        runnable(name, chunked=chunked, whole=whole)


def test_neither_jax_nor_vllm_is_imported() -> None:
    script = (
        "import sys, jaxserve.vllm.mirror, jaxserve.vllm.settings as s; "
        "s.runnable('goodput', chunked=True, whole=True); "
        "sys.exit(str({'jax', 'vllm'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == ""
