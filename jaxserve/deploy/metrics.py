"""The metrics of all replicas on one page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from jaxserve.server.telemetry.metrics import ADAPTER_LABELS, seen_adapters

REPLICA = "replica"
"""The label with the name of a sample's replica."""


class _Gathered(Collector):
    def __init__(
        self, metrics: Mapping[str, Iterable[Metric]], may_see: Callable[[str], bool]
    ) -> None:
        self._metrics, self._may_see = metrics, may_see

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, metrics in self._metrics.items():
            for metric in metrics:
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit)
                )
                family.samples += [
                    sample._replace(labels={**self._seen(sample.labels), REPLICA: replica})
                    for sample in metric.samples
                ]
        yield from families.values()

    def _seen(self, labels: Mapping[str, str]) -> dict[str, str]:
        return {
            name: seen_adapters(value.split(","), self._may_see)
            if name in ADAPTER_LABELS
            else value
            for name, value in labels.items()
        }


def metrics_page(metrics: Mapping[str, Iterable[Metric]], may_see: Callable[[str], bool]) -> bytes:
    """The page in Prometheus' format.

    Args:
        metrics: of each replica, by its name.
        may_see: whether the reader may see an adapter's name.
    """
    return generate_latest(_Gathered(dict(sorted(metrics.items())), may_see))
