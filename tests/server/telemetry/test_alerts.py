"""The alerts ask for what the server exports, and are what Prometheus takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.server.telemetry.promql import OF_PROMETHEUS, Exported, complaints, nodes, parsed

ROOT = Path(__file__).parents[3]
FILE = ROOT / "deploy" / "alerts.yml"
(GROUP,) = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
PROMTOOL = shutil.which("promtool")
SHAPE = {"alert", "expr", "for", "labels", "annotations"}
EACH = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


def with_up(exported: Exported) -> Exported:
    """And what Prometheus itself knows of whom it scrapes."""
    return {**exported, "up": [{name: "jaxserve" for name in OF_PROMETHEUS}]}


def problems(rule: dict[str, Any], exported: Exported) -> list[str]:
    found = complaints(rule["expr"], "", with_up(exported))
    told = " ".join(rule["annotations"].values())
    left = labels(parsed(rule["expr"]), with_up(exported))
    return found + [
        f"{name} is not among its labels"
        for name in re.findall(r"\$labels\.(\w+)", told)
        if name not in left
    ]


def labels(node: Any, exported: Exported) -> set[str]:
    """Those that each alert has."""
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels)
    if isinstance(node, promql.VectorSelector):
        return {name for sample in exported.get(node.name, []) for name in sample} | OF_PROMETHEUS
    if isinstance(node, promql.BinaryExpr):
        sides = [labels(side, exported) for side in (node.lhs, node.rhs)]
        return set.intersection(*(side for side in sides if side))  # numbers have none
    return set().union(*(labels(each, exported) for each in list(nodes(node))[1:]))


@EACH
def test_the_server_exports_what_is_asked_for(rule: dict[str, Any], exported: Exported) -> None:
    assert problems(rule, exported) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("kv_cache_usage_perc", "kv_usage", "there is no jaxserve:kv_usage"),
        ("queue_full", "queue_fall", 'nothing is jaxserve:calls_total{ending="queue_fall"}'),
        ("slo_class, tier", "class, tier", "no class to group by"),
        ("instance, model_name)", "model_name)", "instance is not among its labels"),
    ],
)
def test_what_is_not_there_is_found(
    before: str, after: str, problem: str, exported: Exported
) -> None:
    text = FILE.read_text().replace(before, after)
    assert text != FILE.read_text()
    (group,) = yaml.safe_load(text)["groups"]
    assert problem in [each for rule in group["rules"] for each in problems(rule, exported)]


@EACH
def test_it_says_what_is_wrong_and_how_bad_that_is(rule: dict[str, Any]) -> None:
    assert rule.keys() <= SHAPE and rule.keys() >= SHAPE - {"for"}
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert re.fullmatch(r"\d+[smhd]", rule.get("for", "0s"))
    for page in re.findall(r"docs/[\w-]+\.md", rule["annotations"]["description"]):
        assert (ROOT / page).is_file()


def test_the_documentation_has_each() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| `(Jaxserve\w+)` \|", page, re.M) == [rule["alert"] for rule in RULES]


def test_the_scrape_example_loads_them() -> None:
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    assert scrape["rule_files"] == [FILE.name]
    names = {job["job_name"] for job in scrape["scrape_configs"]}
    (down,) = (rule["expr"] for rule in RULES if rule["expr"].startswith("up{"))
    assert set(re.findall(r'job="(\w+)"', down)) == names


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")
def test_prometheus_takes_them(tmp_path: Path) -> None:
    for check, file in (("rules", FILE), ("config", FILE.with_name("prometheus.yml"))):
        done = subprocess.run([str(PROMTOOL), "check", check, str(file)], capture_output=True)
        assert done.returncode == 0, done.stderr
    broken = tmp_path / FILE.name
    broken.write_text(FILE.read_text().replace("for: 2m", "for: a while"))
    done = subprocess.run([str(PROMTOOL), "check", "rules", str(broken)], capture_output=True)
    assert done.returncode != 0
