"""The model in the box, on any CPU: a few million parameters that write small stories.

    jaxserve serve tiny_cpu
    jaxserve complete "Once upon a time"

Expect the first token within 15 s of the second start (the first one compiles), 64 MiB of pool
and some hundred tokens per second and stream on two cores.
"""

from pathlib import Path

from ml_collections import ConfigDict

import jaxserve
from jaxserve.configs import base


def get_config() -> ConfigDict:
    """`base` with the path of the model in the box, 64 MiB of pool, steps of 512 tokens and 16
    rows."""
    config = base.get_config()
    config.model.path = str(Path(jaxserve.__file__).parent / "assets" / "tiny-stories")
    config.cache.memory_gib = 0.0625
    config.scheduler.max_batch_tokens = 512
    config.scheduler.max_prefill_tokens = 256
    config.scheduler.max_rows = 16
    return config
