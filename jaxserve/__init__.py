"""jaxserve: LLM serving in JAX with SLO-aware scheduling on one paged block pool."""

import os

__version__ = "0.1.0"

# XLA's CPU scheduler runs independent gathers and dots concurrently, which makes paged attention
# several times slower on few cores. Flags are read when jax first makes a client, so set them here.
_CPU_FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"
if _CPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_CPU_FLAG}=false".strip()
