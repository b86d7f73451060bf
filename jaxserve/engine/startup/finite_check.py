"""Whether a model's first tokens give numbers at all, in the dtype that it is served in."""

from __future__ import annotations

import logging

import numpy as np

from jaxserve.engine.device.batch_layout import Rows
from jaxserve.engine.device.executor import Executor
from jaxserve.engine.device.sampling import NOT_FINITE
from jaxserve.models.base import ModelConfig
from jaxserve.pallas_kernels import KV

log = logging.getLogger(__name__)

_TOKENS = 16


def warn_of_overflow(
    executor: Executor, config: ModelConfig, num_blocks: int, most: int, dtype: str
) -> bool:
    """Logs a warning if the logits behind a short prompt are NaN or infinite: requests will fail.

    Args:
        executor: warm, and not serving anything yet. A step runs on it.
        config: the model's.
        num_blocks: of its pool.
        most: tokens of a step, at most.
        dtype: of the model, for the message.

    Returns:
        Whether it did.
    """
    count = min(_TOKENS, most)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, count)
    tokens[0] = config.bos_token_id or 0
    counts, buckets = np.array([count]), executor.buckets
    layout = buckets.fitting(counts, np.array([KV]))
    planes = buckets.planes
    tables = np.arange(planes * buckets.width, dtype=np.int32).reshape(1, planes, -1) % num_blocks
    rows = Rows(
        counts, np.zeros(1, np.int64), tables, tokens=[tokens.tolist()], slots=np.arange(1), emits=1
    )
    found = executor.submit(layout, layout.pack(rows).buffer, full=False).result()
    overflows = bool(found.tokens[0] == NOT_FINITE)
    if overflows:
        log.warning(
            "the model computes NaN or infinite logits in %s behind a prompt of %d tokens: such "
            "requests fail. Serve it in a dtype with more range (model.dtype)",
            dtype,
            count,
        )
    return overflows
