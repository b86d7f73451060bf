"""Models' shapes and devices' rates, as their papers and data sheets give them."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.sched.cache.cache_kinds import (
    ABSORBED,
    HIDDEN_READS,
    default_hidden_read,
    why_no_hidden_caches,
)

READ_EFFICIENCY = 0.94  # of memory bandwidth: llama-2-7b@a100's decode KV slope, 1.92 of 2.04 TB/s
# Of the link to the host. Reported: 25 of an A100's 32 GB/s (github.com/ZaidQureshi/bam/issues/54),
# and 52.8 from, but 35 to, an H100 of 64 GB/s (github.com/NVIDIA/nvbandwidth/issues/24).
HOST_EFFICIENCY = 0.8


WIDE = "16-bit"
# By `model.quantization`; int4 has a scale of 16 bits for each 32, the others one an output.
WEIGHT_BYTES = {WIDE: 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 32}
# By `cache.dtype`: bytes of a number of K, V or a hidden vector, and of a head's scale.
CACHE_BYTES = {WIDE: (2, 0), "fp8": (1, 0), "int8": (1, 4)}


@dataclass(frozen=True)
class Model:
    """Shape of a decoder-only transformer.

    Attributes:
        d_model: Hidden size.
        d_ff: Width of the feed-forward, or of one expert.
        heads: Query heads.
        kv_heads: Heads of K and V.
        head_dim: Size of a head.
        gated: Whether the feed-forward has three matrices instead of two.
        rotary: Whether positions are rotations of queries and keys.
        weights: How its weights are stored, of WEIGHT_BYTES.
        cache: How K, V and hidden vectors are, of CACHE_BYTES.
        experts: Of a layer, of which each has a feed-forward; 0 for one that all tokens go to.
        experts_per_token: How many of them a token goes to.
        shared_d_ff: Width of one more that each token goes to.
        projections: Weights of a layer's attention where they are not those of whole queries, K,
            V and outputs; 0 where they are.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    rotary: bool = True
    weights: str = WIDE
    cache: str = WIDE
    experts: int = 0
    experts_per_token: int = 0
    shared_d_ff: int = 0
    projections: int = 0

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight of a layer's matrices, with its share of the scales."""
        return WEIGHT_BYTES[self.weights]

    @property
    def table_bytes(self) -> float:
        """Bytes of a number of embedding and output matrices: int8 where weights are quantised."""
        return WEIGHT_BYTES[WIDE if self.weights == WIDE else "int8"]

    @property
    def attention_params(self) -> int:
        """Weights of what each token of a layer goes through but the feed-forward; with experts,
        the choice of them and the shared one too."""
        attention = 2 * self.d_model * self.head_dim * (self.heads + self.kv_heads)
        shared = self.matrices * self.d_model * self.shared_d_ff
        return (self.projections or attention) + self.d_model * self.experts + shared

    @property
    def matrices(self) -> int:
        """Of a feed-forward, or an expert."""
        return 3 if self.gated else 2

    @property
    def feed_forward_params(self) -> int:
        """Weights of one feed-forward, or one expert."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices, those of all experts."""
        return self.attention_params + max(self.experts, 1) * self.feed_forward_params

    @property
    def params(self) -> int:
        """Weights, with embedding and output matrices counted separately even where they are
        tied."""
        return self.layers * self.layer_params + 2 * self.vocab * self.d_model

    @property
    def param_bytes(self) -> float:
        """Bytes of its weights."""
        tables = 2 * self.vocab * self.d_model * self.table_bytes
        return self.layers * self.layer_params * self.weight_bytes + tables

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self._vector_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden vector in one layer."""
        return self.d_model // self.head_dim * self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        """Bytes of a head's vector in the cache."""
        number, scale = CACHE_BYTES[self.cache]
        return number * self.head_dim + scale


@dataclass(frozen=True)
class Device:
    """`count` accelerators of one kind under tensor parallelism. Rates and sizes are of one of
    them.

    Attributes:
        flops: Peak dense 16-bit FLOP/s.
        bandwidth: Of its memory, bytes/s.
        memory: Bytes.
        link: Bytes/s that it sends to the other accelerators.
        host_bandwidth: Bytes/s to or from the host.
        count: Accelerators.
        kind: The device whose fitted efficiencies are used (`layers.figures_of`).
        measured: Whether they were fitted to this very device.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    host_bandwidth: float
    count: int = 1
    kind: str = "a100"
    measured: bool = False


MODELS = {
    "opt-125m": Model(12, 768, 3072, 12, 12, 64, 50272, gated=False, rotary=False),
    "opt-1.3b": Model(24, 2048, 8192, 32, 32, 64, 50272, gated=False, rotary=False),
    "opt-6.7b": Model(32, 4096, 16384, 32, 32, 128, 50272, gated=False, rotary=False),
    "opt-13b": Model(40, 5120, 20480, 40, 40, 128, 50272, gated=False, rotary=False),
    "opt-30b": Model(48, 7168, 28672, 56, 56, 128, 50272, gated=False, rotary=False),
    "opt-66b": Model(64, 9216, 36864, 72, 72, 128, 50272, gated=False, rotary=False),
    "opt-175b": Model(96, 12288, 49152, 96, 96, 128, 50272, gated=False, rotary=False),
    "llama-2-7b": Model(32, 4096, 11008, 32, 32, 128, 32000),
    "llama-2-13b": Model(40, 5120, 13824, 40, 40, 128, 32000),
    "llama-2-70b": Model(80, 8192, 28672, 64, 8, 128, 32000),
    "llama-3-8b": Model(32, 4096, 14336, 32, 8, 128, 128256),
    "llama-3-70b": Model(80, 8192, 28672, 64, 8, 128, 128256),
    "mistral-7b": Model(32, 4096, 14336, 32, 8, 128, 32000),
    "yi-6b": Model(32, 4096, 11008, 32, 4, 128, 64000),
    "yi-34b": Model(60, 7168, 20480, 56, 8, 128, 64000),
    "qwen2-7b": Model(28, 3584, 18944, 28, 4, 128, 152064),
    "gemma-3-27b": Model(62, 5376, 21504, 32, 16, 128, 262208),
    "qwen3-30b-a3b": Model(48, 2048, 768, 32, 4, 128, 151936, experts=128, experts_per_token=8),
    "gpt-oss-20b": Model(24, 2880, 2880, 64, 8, 64, 201088, experts=32, experts_per_token=4),
    # Its first layer is taken as the others, and has no experts; K and V are cached whole.
    "deepseek-v2-lite": Model(
        *(27, 2048, 1408, 16, 16, 192, 102400),
        experts=64,
        experts_per_token=6,
        shared_d_ff=2 * 1408,
        projections=2048 * (16 * 192 + 512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048,
    ),
    "mixtral-8x7b": Model(32, 4096, 14336, 32, 8, 128, 32000, experts=8, experts_per_token=2),
}

DEVICES = {
    # Data sheets: dense bf16 tensor FLOP/s, memory bytes/s, memory bytes, and half of what NVIDIA
    # says of NVLink (an L4 has PCIe 4.0 x16) and Google of the chips' interconnect, which is the
    # sum of both directions. To the host: PCIe x16, of generation 4 or 5; of TPUs what "How to
    # Scale Your Model" (Google DeepMind, 2025, part 2) says of a chip.
    "a100": Device(312e12, 2.039e12, 80e9, 300e9, 32e9, measured=True),
    "a100-40g": Device(312e12, 1.555e12, 40e9, 300e9, 32e9),
    "h100": Device(989e12, 3.35e12, 80e9, 450e9, 64e9, kind="h100", measured=True),
    "h200": Device(989e12, 4.8e12, 141e9, 450e9, 64e9, kind="h100"),
    "l4": Device(121e12, 0.3e12, 24e9, 32e9, 32e9),
    "v5e": Device(197e12, 0.819e12, 16e9, 200e9, 16e9),
    "v5p": Device(459e12, 2.765e12, 95e9, 600e9, 16e9),
    "v6e": Device(918e12, 1.64e12, 32e9, 400e9, 32e9),
}


def moved_slot(model: Model, device: Device) -> dict[str, float]:
    """The cost model's coefficients of moves: seconds a layer to copy a slot of one plane in device
    memory, or to move it to or from the host. Devices share a slot by heads, each over its own
    link."""
    plane = model.kv_bytes / 2 / device.count
    return {
        "copied_slot": 2 * plane / (READ_EFFICIENCY * device.bandwidth),
        "swapped_slot": plane / (HOST_EFFICIENCY * device.host_bandwidth),
    }


def hidden_read_of(model: Model, wanted: str = "auto") -> str | None:
    """How the model's hidden caches are read.

    Args:
        model: The model.
        wanted: `auto` or one of HIDDEN_READS.

    Returns:
        One of HIDDEN_READS; None if the model has no hidden caches (`why_no_hidden_caches`).

    Raises:
        ValueError: The model does not support the read that is wanted.
    """
    if wanted not in ("auto", *HIDDEN_READS):
        known = ", ".join(("auto", *HIDDEN_READS))
        raise ValueError(f"hidden_read must be one of {known}, got {wanted!r}")
    if wanted == ABSORBED and model.rotary:
        raise ValueError("hidden_read=absorbed needs a model without rotary positions")
    shape = model.d_model, model.heads, model.kv_heads, model.head_dim
    if model.weights != WIDE:  # hidden caches read the weights of K and V as they are
        return None
    if model.cache != WIDE and wanted == "auto":  # as engines have it: texts would depend on it
        return None
    if why_no_hidden_caches(*shape) is not None:
        return None
    return default_hidden_read(rotary=model.rotary) if wanted == "auto" else wanted
