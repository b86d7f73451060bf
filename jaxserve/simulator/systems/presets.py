"""Systems with constants that InferMax's authors fitted to their measurements.

They do not include the cost of moving caches: it comes from the devices' data sheets
(`moved_slot`).
"""

from __future__ import annotations

import dataclasses

from jaxserve.sched.cost.cost_model import Coefficients, InferMaxCostModel, LinearCostModel
from jaxserve.sched.cost.hardware import DEVICES, Device, moved_slot
from jaxserve.sched.cost.model_shapes import MODELS, Model
from jaxserve.sched.cost.profiles import System

MS = 1e-3


# In the order of the authors' code.
_ORDER = (
    *("prefill_quad", "prefill_bias", "per_prefill", "prefill_m", "decode_kv", "decode_bias"),
    *("per_decode", "per_token", "token_bias"),
)


def _fitted(model: Model, device: Device, *ms: float) -> LinearCostModel:
    """ms: milliseconds per layer, in that order."""
    fitted = {name: value * MS for name, value in zip(_ORDER, ms, strict=True)}
    coefficients = Coefficients(**fitted, **moved_slot(model, device))
    return LinearCostModel(coefficients, model.layers, overlapped=True)


_A100 = DEVICES["a100"]
LLAMA_2_7B = _fitted(
    MODELS["llama-2-7b"],
    _A100,
    *(1.6773e-7, 0.0926, 0.001534, 9.224e-6, 8.513e-6, 0.01921, 0.00074, 0.00191, 0.06486),
)
LLAMA_3_70B = _fitted(
    MODELS["llama-3-70b"],
    dataclasses.replace(_A100, count=4),
    *(4.309e-8, 0.2112, 9.03e-4, 3.805e-7, 1.222e-6, 0.081, 3.92e-4, 0.002, 0.159),
)

_AUTHORS = {
    "source": "constants fitted by InferMax's authors (arXiv 2411.07447, section 3.2)",
    "moves": "specification",
}

PRESETS = {
    system.name: system
    for system in (
        System(
            "llama-2-7b@a100",
            LLAMA_2_7B,
            kv_tokens=100_000,
            paper=InferMaxCostModel(
                LLAMA_2_7B, (1.00667e-3 * MS, 1.16249e-5 * MS, 4.58848e-10 * MS)
            ),
            about=_AUTHORS,
        ),
        System(
            "llama-3-70b@4xa100",
            LLAMA_3_70B,
            kv_tokens=100_000,
            max_batch_tokens=16384,
            paper=InferMaxCostModel(LLAMA_3_70B, (0.0, 2.82553e-5 * MS, 1.89508e-11 * MS), 1.1),
            about=_AUTHORS,
        ),
    )
}
