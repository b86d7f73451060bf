"""jaxserve: LLM serving in JAX with SLO-aware scheduling on one paged block pool."""

import importlib
import os

__version__ = "0.2.0"

# XLA's CPU scheduler runs independent gathers and dots concurrently, which makes paged attention
# several times slower on few cores. Flags are read when jax first makes a client, so set them here.
_CPU_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
if _CPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CPU_FLAG}=false".strip()

_OFFLINE = {
    "LLM": "jaxserve.offline.llm",
    "Grammar": "jaxserve.sched.request",
    "Observer": "jaxserve.engine.stats",
    "Program": "jaxserve.sched.request",
    "RequestOutput": "jaxserve.offline.outputs",
    "SamplingParams": "jaxserve.sched.request",
    "SLO": "jaxserve.sched.request",
    "StepRecorder": "jaxserve.engine.stats",
    "Tier": "jaxserve.sched.request",
}
__all__ = [*_OFFLINE, "__version__"]


def __getattr__(name: str) -> object:
    """What people import from here, loaded when they do: jax takes seconds."""
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_OFFLINE[name]), name)
    except ModuleNotFoundError as error:
        from jaxserve.extras import problem

        if (text := problem(f"jaxserve.{name}", error)) is None:
            raise
        raise ImportError(text, name=error.name) from None
