"""OPT-125M in float32 on a CPU, with random weights by default.

    jaxserve serve opt_125m_cpu
    jaxserve serve opt_125m_cpu --model=/path/to/opt-125m

docs/performance.md has measurements with this configuration. Random weights write noise, at the
same speed. It has 0.5 GiB of weights and 1 GiB of pool.
"""

from ml_collections import ConfigDict

from jaxserve.configs import base


def get_config() -> ConfigDict:
    """`base` with the shape of OPT-125M, random float32 weights, 1 GiB of pool in blocks of 32
    tokens, and requests of up to 1,024 tokens."""
    config = base.get_config()
    config.model.preset = "opt-125m"
    config.model.load_format = "random"
    config.model.dtype = "float32"
    config.cache.memory_gib = 1.0
    # On a CPU, gathering blocks of 32 tokens is faster than of 16: fewer, longer copies.
    config.cache.block_size = 32
    # Steps for longer requests take minutes to compile, and few are sent to a CPU.
    config.engine.max_model_len = 1024
    config.scheduler.max_batch_tokens = 1024
    return config
