"""The metrics of all replicas on one page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

REPLICA = "replica"
"""The label that says whose a sample is."""


class _Gathered(Collector):
    def __init__(self, metrics: Mapping[str, Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, metrics in self._metrics.items():
            for metric in metrics:
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                family.samples += [
                    sample._replace(labels={**sample.labels, REPLICA: replica})
                    for sample in metric.samples
                ]
        yield from families.values()


def metrics_page(metrics: Mapping[str, Iterable[Metric]]) -> bytes:
    """As Prometheus reads them. metrics: of each replica, by its name."""
    return generate_latest(_Gathered(dict(sorted(metrics.items()))))
