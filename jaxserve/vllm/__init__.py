"""Policies of `sched` inside vLLM, by its `--scheduler-cls`."""

import importlib

_OWN = {"Scheduler": "jaxserve.vllm.scheduler", "Targets": "jaxserve.vllm.request_check"}
__all__ = [*_OWN]


def __getattr__(name: str) -> object:
    """What vLLM's flags name, loaded when they do: its modules take seconds."""
    if name not in _OWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWN[name]), name)
