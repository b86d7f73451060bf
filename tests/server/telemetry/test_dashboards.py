"""The Grafana dashboard and the alerts ask for what the server exports, and are what Grafana and
Prometheus take."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.client import Client, make_line
from jaxserve.config import ServerConfig
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.requests.slo_classes import ServiceLevel
from tests.server.batches.serving import serving
from tests.server.fake_engine import FakeEngine

Exported = dict[str, list[dict[str, str]]]
OF_PROMETHEUS = {"instance", "job"}  # labels that it gives to what it scrapes


def parsed(expression: str) -> Any:
    """With Grafana's own variables as it fills them in."""
    filled = expression.replace("$__rate_interval", "1m")
    return promql.parse(re.sub(r"\$\w+", ".*", filled))


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if hasattr(node, name):
            yield from nodes(getattr(node, name))
    for argument in getattr(node, "args", ()):
        yield from nodes(argument)


def selects(matcher: Any, value: str) -> bool:
    if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
        same = value == matcher.value
    else:
        same = re.fullmatch(matcher.value, value) is not None
    return same == (matcher.op in (promql.MatchOp.Equal, promql.MatchOp.Re))


def complaints(expression: str, legend: str, exported: Exported) -> list[str]:
    """What of an expression the server does not export."""
    found, labels = [], set[str]()
    everything = list(nodes(parsed(expression)))
    for node in everything:
        if not isinstance(node, promql.VectorSelector):
            continue
        samples = exported.get(node.name, [])
        labels |= {name for sample in samples for name in sample} | OF_PROMETHEUS
        asked = [m for m in node.matchers.matchers if m.name not in OF_PROMETHEUS]
        if not samples:
            found.append(f"there is no {node.name}")
        elif not any(all(selects(m, s.get(m.name, "")) for m in asked) for s in samples):
            found.append(f"nothing is {node.prettify()}")
        names = {name for sample in samples for name in sample} | OF_PROMETHEUS
        found += [f"{node.name} has no {m.name}" for m in asked if m.name not in names]
    grouped = [set(n.modifier.labels) for n in everything if isinstance(n, promql.AggregateExpr)]
    shown = set(re.findall(r"{{(\w+)}}", legend))
    for kept in grouped:
        found += [f"no {name} to group by" for name in kept - labels]
        found += [f"{name} of the legend is summed up" for name in shown - kept]
    return found + [f"no {name} for the legend" for name in shown - labels]


ROOT = Path(__file__).parents[3]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "jaxserve.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']}: {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


@pytest.mark.parametrize(("expression", "legend"), QUERIES)
def test_the_server_exports_what_is_asked_for(
    exported: Exported, expression: str, legend: str
) -> None:
    assert complaints(expression, legend, exported) == []


@pytest.mark.parametrize(
    ("expression", "legend", "complaint"),
    [
        ("rate(jaxserve:renamed_total[1m])", "", "there is no jaxserve:renamed_total"),
        ('jaxserve:num_requests{teir="realtime"}', "", "jaxserve:num_requests has no teir"),
        ('jaxserve:num_requests{tier="gold"}', "", 'nothing is jaxserve:num_requests{tier="gold"}'),
        ("sum by (model) (jaxserve:num_blocks)", "", "no model to group by"),
        ("jaxserve:num_blocks", "{{kind}}", "no kind for the legend"),
        ("sum by (tier) (jaxserve:num_requests)", "{{state}}", "state of the legend is summed up"),
    ],
)
def test_what_is_not_there_is_found(
    exported: Exported, expression: str, legend: str, complaint: str
) -> None:
    assert complaint in complaints(expression, legend, exported)


def test_each_row_is_about_what_it_should_be() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        *(
            "Targets",
            "Latency",
            "Requests",
            "Throughput",
            "Block pool",
            "Steps",
            "Batches",
            "Programs",
        )
    ]


def test_grafana_can_import_it() -> None:
    """By its JSON model, version 38: Grafana 10.0, which later ones bring up to theirs."""
    assert DASHBOARD["schemaVersion"] == 38
    assert DASHBOARD["uid"] and DASHBOARD["title"] and "id" not in DASHBOARD
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    datasource, *variables = DASHBOARD["templating"]["list"]
    assert (datasource["name"], datasource["type"]) == ("datasource", "datasource")
    named = {each["name"] for each in variables} | {"datasource", "__rate_interval", "__all"}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(\w+)", text)) == named
    for each in [*variables, *PANELS, *(t for panel in PANELS for t in panel["targets"])]:
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters))
    cells = list(itertools.chain.from_iterable(map(_cells, DASHBOARD["panels"])))
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(0 <= x < 24 for x, _ in cells)


def _cells(panel: dict[str, Any]) -> list[tuple[int, int]]:
    at = panel["gridPos"]
    columns, rows = range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])
    return list(itertools.product(columns, rows))


@pytest.mark.parametrize("variable", DASHBOARD["templating"]["list"][1:], ids=lambda v: v["name"])
def test_its_variables_are_labels(exported: Exported, variable: dict[str, Any]) -> None:
    query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
    assert query is not None
    (selector,) = nodes(parsed(query[1]))
    assert query[2] in {*exported[selector.name][0], *OF_PROMETHEUS}


def test_the_scrape_example_is_for_the_port_of_the_metrics() -> None:
    scrape = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())
    (job,) = scrape["scrape_configs"]
    port = ServerConfig().metrics_port
    assert job["static_configs"] == [{"targets": [f"localhost:{port}"]}]


FILE = ROOT / "deploy" / "alerts.yml"
(GROUP,) = yaml.safe_load(FILE.read_text())["groups"]
RULES: list[dict[str, Any]] = GROUP["rules"]
PROMTOOL = shutil.which("promtool")
SHAPE = {"alert", "expr", "for", "labels", "annotations"}
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])


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


@EACH_RULE
def test_the_server_exports_what_alerts_ask_for(rule: dict[str, Any], exported: Exported) -> None:
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
def test_what_is_not_there_is_found_in_alerts(
    before: str, after: str, problem: str, exported: Exported
) -> None:
    text = FILE.read_text().replace(before, after)
    assert text != FILE.read_text()
    (group,) = yaml.safe_load(text)["groups"]
    assert problem in [each for rule in group["rules"] for each in problems(rule, exported)]


@EACH_RULE
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


CLASSES = {"chat": ServiceLevel(SLO(ttft=0.1, tbt=0.5), Tier.REALTIME, "chat")}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Labels of each sample by its name, once there have been some requests of all sorts."""
    engine = FakeEngine()
    folder = tmp_path_factory.mktemp("batches")
    with (
        serving(engine, folder, metrics_port=0, slo_classes=CLASSES) as server,
        Client(server.address) as client,
    ):
        engine.run()
        client.complete("hello", max_tokens=3, slo_class="chat")
        client.complete("hello", max_tokens=3, tier="best_effort")
        client.submit_batch("mine", [make_line("a", max_tokens=2)])
        list(client.get_batch("mine"))
        url = f"http://{server.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=20) as reply:
            text = reply.read().decode()
    found: Exported = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found
