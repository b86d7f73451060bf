"""Ray Serve's autoscaling policy over `load.wanted`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ray.serve.config import AutoscalingContext

from jaxserve.deploy.load import Load, wanted_replicas


def scale(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be; Ray Serve keeps it within its bounds and delays. It has
    the means over `look_back_period_s` of what each replica's `record_autoscaling_stats` said."""
    by_replica: dict[Any, dict[str, float]] = defaultdict(dict)
    for name, values in (context.aggregated_metrics or {}).items():
        for replica, value in values.items():
            by_replica[replica][name] = value
    loads = [Load.from_metrics(metrics) for metrics in by_replica.values() if "busy" in metrics]
    return wanted_replicas(loads, context.current_num_replicas), {}
