"""The page of all replicas."""

from __future__ import annotations

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.deploy.metrics import metrics_page


def told(count: float) -> list[Metric]:
    counter = CounterMetricFamily("jaxserve:calls", "Calls.", labels=("model_name",))
    counter.add_metric(("m",), count)
    histogram = HistogramMetricFamily("jaxserve:ttft_seconds", "TTFT.")
    histogram.add_metric((), [("0.1", count), ("+Inf", count + 1)], 0.5)
    return [counter, histogram]


def test_samples_say_whose_they_are_and_families_are_one() -> None:
    text = metrics_page({"b": told(2.0), "a": told(1.0)}, lambda _: True).decode()
    assert text.count("# TYPE jaxserve:calls_total counter") == 1
    assert text.count("# TYPE jaxserve:ttft_seconds histogram") == 1
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert len(found) == 2 * 5
    assert found["jaxserve:calls_total", ("model_name", "m"), ("replica", "b")] == 2.0
    assert found["jaxserve:ttft_seconds_bucket", ("le", "0.1"), ("replica", "a")] == 1.0
    assert found["jaxserve:ttft_seconds_sum", ("replica", "a")] == 0.5


def test_a_reader_sees_the_adapters_that_it_may_use() -> None:
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    info = GaugeMetricFamily("jaxserve:lora_requests_info", "Adapters.", labels=labels)
    info.add_metric(("8", "law,sql", "tax"), 1.0)
    text = metrics_page({"a": [info]}, {"law", "tax"}.__contains__).decode()
    assert 'running_lora_adapters="law",waiting_lora_adapters="tax"' in text
    assert 'max_lora="8"' in text and "sql" not in text
