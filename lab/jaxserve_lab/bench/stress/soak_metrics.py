"""The metrics of the server in `bench soak`."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from jaxserve_lab.bench.stress.server_process import Victim

AT_REST = ("num_requests_running", "num_requests_waiting", "num_host_slots_used")
SAMPLE_S = 0.5
_SETTLE_S = 60.0
_READ_S = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Page:
    """The server's metrics at one time.

    Attributes:
        values: Values of metrics without labels, by name without "jaxserve:".
        endings: Number of calls, by (method, ending).
    """

    values: dict[str, float] = field(default_factory=dict)
    endings: dict[tuple[str, str], int] = field(default_factory=dict)


def metrics(server: Victim) -> Page:
    """Reads the server's metrics. Raises OSError if it does not answer."""
    with _DIRECT.open(f"http://{server.http_address}/metrics", timeout=_READ_S) as page:
        return read_page(page.read().decode())


def read_page(text: str) -> Page:
    """Parses a page in Prometheus's text format."""
    page = Page()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name.removeprefix("jaxserve:"), sample.labels
            if name == "calls_total":
                page.endings[labels["method"], labels["ending"]] = int(sample.value)
            elif set(labels) <= {"model_name"}:
                page.values[name] = sample.value
    return page


def tokens(server: Victim) -> float | None:
    """Tokens that the server has generated so far; None if unknown."""
    try:
        return metrics(server).values["generation_tokens_total"]
    except OSError:
        return None


def settled(server: Victim, also: Callable[[], bool]) -> Page:
    """Waits until nothing runs or waits and `also` holds, for a while at most, and returns the
    metrics."""
    until = time.monotonic() + _SETTLE_S
    while True:
        page = metrics(server)
        idle = not any(page.values[name] for name in AT_REST)
        if (idle and also()) or time.monotonic() > until:
            return page
        time.sleep(SAMPLE_S)
