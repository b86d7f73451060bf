"""OPT-13B in float16 on one A100 with 40 GB.

    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
    jaxserve serve opt_13b_a100_40g --model=/path/to/opt-13b
    jaxserve serve opt_13b_a100_40g --load_format=random

The first command takes a Hugging Face directory, or one converted by `jaxserve convert`, which
loads faster. JAX takes only three quarters of the memory unless the variable is set. Calculated,
not measured: the weights take 24 GiB and leave room for about 15,000 tokens of K and V (0.78 MiB
per token), 25 requests of 600 tokens at once.
"""

from ml_collections import ConfigDict

from jaxserve.configs import base


def get_config() -> ConfigDict:
    """`base` with the shape of OPT-13B in float16, 95% of the memory in use, and 128 rows."""
    config = base.get_config()
    config.model.preset = "opt-13b"
    config.model.dtype = "float16"
    config.cache.memory_fraction = 0.95
    config.scheduler.max_rows = 128
    config.scheduler.max_queue = 1024
    return config
