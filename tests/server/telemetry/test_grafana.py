"""The Grafana dashboard asks for what the server exports, and is one that Grafana can import."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve.config import ServerConfig
from tests.server.telemetry.promql import OF_PROMETHEUS, Exported, complaints, nodes, parsed

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
        *("Targets", "Latency", "Requests", "Throughput", "Block pool", "Steps", "Batches")
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
