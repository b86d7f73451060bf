"""The rules of a paper: all that changes its figures, and the figures of InferMax's authors."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxserve.config import CacheConfig
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.simulator.simulate.cli import main
from jaxserve.simulator.simulator import RULES, Rules, policy_under
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.specs import WorkloadSpec
from tests.simulator.grouped import simulate

SEVEN = system("llama-2-7b@a100")
# Of the authors' published simulator, C = 4,096: latency in seconds, batches, preemptions.
_NAMES = ("latency", "batches", "preemptions")
AUTHORS = [
    ("vllm", "fixed:128x32x32", 100_000, 0.4694, 32, 0),
    ("vllm", "fixed:128x32x1024", 100_000, 13.87, 101, 153),
    ("sarathi+ef", "fixed:64x32x1024", 1_000, 17.08, 3296, 0),
    ("sarathi", "fixed:512x512x1024", 100_000, 222.50, 4518, 412),
]


@pytest.mark.promise(25)
@pytest.mark.parametrize(("policy", "workload", "kv_tokens", *_NAMES), AUTHORS)
def test_the_command_gives_the_authors_figures(
    policy: str, workload: str, kv_tokens: int, latency: float, batches: int, preemptions: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    argv = [f"--policy={policy}", f"--workload={workload}", f"--kv_tokens={kv_tokens}"]
    argv += ["--system=llama-2-7b@a100", "--max_batch_tokens=4096", "--rules=infermax_paper"]
    assert main([*argv, "--seeds=1", "--jobs=1", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out.splitlines()[-1])["points"]
    assert (point["rules"], point["prefix_caching"]) == ("infermax_paper", False)
    check(point["mean"], latency, batches, preemptions)


@pytest.mark.promise(25)
@pytest.mark.parametrize(
    ("policy", "workload", "kv_tokens", *_NAMES),
    [*AUTHORS[:3], pytest.param(*AUTHORS[3], marks=pytest.mark.slow)],
)
def test_the_reference_in_python_gives_them_too(
    policy: str, workload: str, kv_tokens: int, latency: float, batches: int, preemptions: int
) -> None:
    requests = WorkloadSpec(workload).make_workload()
    how: dict[str, Any] = {"rules": "infermax_paper", "compiled": False}
    found = simulate(policy, requests, SEVEN, kv_tokens=kv_tokens, **how)
    check(found.summary(), latency, batches, preemptions)


def check(found: dict[str, Any], latency: float, batches: int, preemptions: int) -> None:
    """Four digits of the latency, as the authors' are known."""
    assert f"{found['latency_s']:.4g}" == f"{latency:.4g}"
    assert (found["num_batches"], found["num_preemptions"]) == (batches, preemptions)


def test_rules_name_every_field() -> None:
    """A field that a preset left out would have a default, which may change."""
    for field in dataclasses.fields(Rules):
        missing = dataclasses.MISSING
        assert (field.default, field.default_factory) == (missing, missing), field.name


def test_what_a_measured_engine_has_is_not_in_a_papers_rules() -> None:
    requests = WorkloadSpec("fixed:100x20x40").make_workload()
    measured = dataclasses.replace(
        SEVEN,
        host=HostOverhead(plan=0.1, receive=0.2, wake=0.3),
        padding=Padding((4096,), (4096,)),
        block_size=32,
    )
    bare, full = (
        simulate("sarathi", requests, place, kv_tokens=2000, rules="infermax_paper").summary()
        for place in (SEVEN, measured)
    )
    assert full == bare
    assert simulate("sarathi", requests, measured, kv_tokens=2000).summary() != bare


def test_rules_set_what_the_policies_of_that_paper_share() -> None:
    """Whatever their own defaults come to be."""
    paper = RULES["infermax_paper"]
    for name in ("vllm", "sarathi", "sarathi_pc", "rank_i", "infermax", "orca", "fastgen"):
        policy: Any = policy_under(name, paper)
        assert {key: getattr(policy, key) for key in paper.policy} == paper.policy, name


def test_the_products_own_rules_find_prefixes_as_a_server_does() -> None:
    assert RULES["jaxserve"].prefix_caching is CacheConfig.prefix_caching


def test_a_flag_beside_the_rules_wins_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--policy=vllm", "--workload=fixed:64x16x12", "--kv_tokens=512", "--seeds=1"]
    argv += ["--max_batch_tokens=256", "--jobs=1", "--rules=infermax_paper"]
    assert main([*argv, "--block_size=1", "--no-prefix_caching"]) == 0
    assert "rules" not in capsys.readouterr().out
    assert main([*argv, "--block_size=16", "--prefix_caching"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "rules infermax_paper, but for --block_size=16 and --prefix_caching"
