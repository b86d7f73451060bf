"""What the devices of a group gather of each other's parts: one request's at a time."""

from __future__ import annotations

from collections.abc import Iterator

from jaxserve.compile_check.analysis import hlo
from jaxserve.compile_check.case import Case
from jaxserve.engine.device.buckets import PROJECTED_TOKENS


def too_large(case: Case, module: hlo.Module) -> Iterator[str]:
    """Each all-gather whose result is more than any of these: the hidden vectors of the longest
    request (or of those tokens that become K and V at once, in all layers), float32 activations of
    the largest batch, its logits. What is gathered for all requests together is far more."""
    config, sizes = case.config, case.sizes
    tokens = max(config.max_position * case.dtype.itemsize, sizes.max_batch_tokens * 4)
    projected = PROJECTED_TOKENS * config.num_layers * case.dtype.itemsize
    most = max(config.d_model * max(tokens, projected), sizes.max_rows * config.vocab_size * 4)
    for operations in module.computations.values():
        for op in operations:
            if op.opcode not in ("all-gather", "all-gather-start"):
                continue
            size = max((array.size for part in op.written for array in part), default=0)
            if size > most:
                yield f"{op.name} gathers {size >> 20} MiB of all devices at once"
