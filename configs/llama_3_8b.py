"""Llama 3 8B in bfloat16 on one GPU or TPU with at least 24 GB.

    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
    jaxserve serve llama_3_8b --model=/path/to/Meta-Llama-3-8B
    jaxserve serve llama_3_8b --load_format=random

Other Llama-style models (Llama 2, Yi, Mistral, Qwen) are served the same way. On GPUs JAX takes
only three quarters of the memory unless the variable is set. Calculated, not measured:
the weights take 15 GiB and a token of K and V 128 KiB, so that 40 GB hold about 150,000 tokens.
With several devices add `--config.mesh.tensor=2`.
"""

from ml_collections import ConfigDict

from jaxserve.configs import base


def get_config() -> ConfigDict:
    """`base` with the shape of Llama 3 8B in bfloat16, steps of 1,024 tokens and 128 rows."""
    config = base.get_config()
    config.model.preset = "llama-3-8b"
    config.model.dtype = "bfloat16"
    config.scheduler.max_batch_tokens = 1024
    config.scheduler.max_prefill_tokens = 1024
    config.scheduler.max_rows = 128
    config.scheduler.max_queue = 1024
    return config
