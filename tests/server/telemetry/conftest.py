"""What a server exports, for what asks for it."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.client import Client, make_line
from jaxserve.sched.request import SLO, Tier
from jaxserve.server.batches.batch_operations import BatchSettings
from jaxserve.server.requests.slo_classes import ServiceLevel
from jaxserve.server.server import Server
from tests.server.batches.journals import opened
from tests.server.fake_engine import FakeEngine
from tests.server.telemetry.promql import Exported

CLASSES = {"chat": ServiceLevel(SLO(ttft=0.1, tbt=0.5), Tier.REALTIME, "chat")}


@pytest.fixture(scope="package")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Labels of each sample by its name, once there have been some requests of all sorts."""
    engine = FakeEngine()
    with opened(tmp_path_factory.mktemp("batches")) as journal:
        settings = BatchSettings(journal, 4, 1e9)
        with (
            Server(
                engine, grace_s=0.0, metrics_port=0, batches=settings, slo_classes=CLASSES
            ) as server,
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
