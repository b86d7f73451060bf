"""The axis of the device mesh, and which axes of parameters and activations are divided over it."""

from __future__ import annotations

TENSOR = "tensor"

# None: every device has the whole axis.
RULES: dict[str, str | None] = {
    "experts": TENSOR,  # if their width does not divide
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "expert_mlp": TENSOR,
    "vocab": TENSOR,
    "embed": None,
    "latent": None,
    "norm": None,
    "layers": None,
    "positions": None,
    "head_dim": None,
    "tokens": None,
    "rows": None,
    "blocks": None,
    "slots": None,
}
