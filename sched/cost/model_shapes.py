"""Shapes of models, from their papers and configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace

WIDE = "16-bit"
# By `model.quantization`; int4 has a 16-bit scale per 32 weights, the others one per output.
WEIGHT_BYTES = {WIDE: 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5 + 2 / 32}
# By `cache.dtype`: bytes per number of K, V or a hidden vector, and per scale of a head. What is
# not the latent vector of latent attention always has 16 bits.
CACHE_BYTES = {WIDE: (2, 0), "fp8": (1, 0), "int8": (1, 4)}
WHOLE = "whole"  # K and V of all heads, 16-bit, in place of latent vectors: `Model.with_whole_keys`


@dataclass(frozen=True)
class Model:
    """Shape of a decoder-only transformer.

    Attributes:
        d_model: Hidden size.
        d_ff: Width of the feed-forward, or of one expert.
        heads: Query heads.
        kv_heads: Heads of K and V.
        head_dim: Size of a head of K or V.
        gated: Whether the feed-forward has three matrices instead of two.
        rotary: Whether positions are encoded as rotations of queries and keys.
        weights: Storage of the weights, of WEIGHT_BYTES.
        cache: Storage of K, V and hidden vectors, of CACHE_BYTES.
        experts: Experts per layer, each with a feed-forward; 0 for one dense feed-forward.
        experts_per_token: Experts that each token goes to.
        shared_d_ff: Width of the shared expert that every token goes to; 0 for none.
        dense_layers: Number of layers with a feed-forward of `dense_d_ff` in place of experts. They
        count as such in memory; in time, all layers are alike.
        dense_d_ff: Width of that feed-forward.
        projections: Attention weights per layer, if they differ from full projections of queries,
        K, V and outputs; otherwise 0.
        latent: If K and V of a token are the halves of one vector, which is the key of all heads:
        its first elements, which are their value, the latent vector. Every device has it whole.
        Otherwise 0.
        state_layers: Number of layers that keep a state in place of K and V.
        state: Numbers, 32-bit, of such a layer's state of a request.
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
    dense_layers: int = 0
    dense_d_ff: int = 0
    projections: int = 0
    latent: int = 0
    state_layers: int = 0
    state: int = 0

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of a layer's matrices, including scales."""
        return WEIGHT_BYTES[self.weights]

    @property
    def table_bytes(self) -> float:
        """Bytes per number of the embedding and output matrices: int8 if weights are quantised."""
        return WEIGHT_BYTES[WIDE if self.weights == WIDE else "int8"]

    @property
    def attention_params(self) -> int:
        """Weights per layer that every token uses, except the feed-forward; with experts, this
        includes the router and the shared expert."""
        attention = 2 * self.d_model * self.head_dim * (self.heads + self.kv_heads)
        shared = self.matrices * self.d_model * self.shared_d_ff
        return (self.projections or attention) + self.d_model * self.experts + shared

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward, or an expert."""
        return 3 if self.gated else 2

    @property
    def feed_forward_params(self) -> int:
        """Weights of one feed-forward, or one expert."""
        return self.matrices * self.d_model * self.d_ff

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices, including all experts."""
        return self.attention_params + max(self.experts, 1) * self.feed_forward_params

    @property
    def matrix_params(self) -> int:
        """Weights of all layers' matrices."""
        saved = self.d_model * self.experts + self.experts * self.feed_forward_params
        saved -= self.matrices * self.d_model * (self.dense_d_ff - self.shared_d_ff)
        return self.layers * self.layer_params - self.dense_layers * saved

    @property
    def params(self) -> int:
        """All weights, with embedding and output matrices counted separately even if they are
        tied."""
        return self.matrix_params + 2 * self.vocab * self.d_model

    @property
    def param_bytes(self) -> float:
        """Bytes of all weights."""
        tables = 2 * self.vocab * self.d_model * self.table_bytes
        return self.matrix_params * self.weight_bytes + tables

    @property
    def kv_layers(self) -> int:
        """Layers with K and V."""
        return self.layers - self.state_layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's K and V in one layer."""
        return 2 * self.kv_heads * self._vector_bytes

    def kv_bytes_on(self, devices: int) -> int:
        """Bytes of one token's K and V in one layer, on all of so many devices."""
        return self.kv_bytes * (devices if self.latent else 1)

    @property
    def attended(self) -> int:
        """Elements of one token's keys and values that a query head multiplies."""
        return 2 * self.head_dim + self.latent

    def with_whole_keys(self) -> Model:
        """The model of latent vectors with K and V of each head in its cache, both as wide as K, as
        engines without absorbed attention keep them.

        Raises:
            ValueError: It has no latent vectors.
        """
        if not self.latent:
            raise ValueError("K and V are whole as they are: only latent vectors can be made so")
        return replace(self, latent=0, kv_heads=self.heads, head_dim=128 + 64)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one token's hidden vector in one layer."""
        return self.d_model // self.head_dim * self._vector_bytes

    @property
    def _vector_bytes(self) -> int:
        """Bytes of a head's vector in the cache."""
        number, scale = CACHE_BYTES[self.cache]
        wide = self.head_dim - self.latent // 2 if self.latent else 0
        return number * (self.head_dim - wide) + CACHE_BYTES[WIDE][0] * wide + scale


def _of_latent(d_model: int, heads: int) -> int:
    """Weights of a DeepSeek's attention beside those of its queries."""
    return d_model * (512 + 64) + 512 * heads * (128 + 128) + heads * 128 * d_model


def _of_gated(d_model: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Weights of an attention of which each query head has a gate."""
    return d_model * head_dim * (3 * heads + 2 * kv_heads)


def _of_delta(d_model: int, key_heads: int, value_heads: int, head_dim: int) -> int:
    """Weights of a gated delta net."""
    keys, values = key_heads * head_dim, value_heads * head_dim
    return d_model * (2 * keys + 3 * values + 2 * value_heads)


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
    # 36 of 48 layers have a gated delta net, of 16 key and 32 value heads of 128, with 4 taps.
    "qwen3-next-80b": Model(
        *(48, 2048, 512, 16, 2, 256, 151936),
        experts=512,
        experts_per_token=10,
        shared_d_ff=512,
        projections=(_of_gated(2048, 16, 2, 256) + 3 * _of_delta(2048, 16, 32, 128)) // 4,
        state_layers=36,
        state=32 * 128 * 128 + 3 * (2 * 16 + 32) * 128,
    ),
    "gpt-oss-20b": Model(24, 2880, 2880, 64, 8, 64, 201088, experts=32, experts_per_token=4),
    "gpt-oss-120b": Model(36, 2880, 2880, 64, 8, 64, 201088, experts=128, experts_per_token=4),
    "deepseek-v2-lite": Model(
        *(27, 2048, 1408, 16, 1, (512 + 64) // 2, 102400),
        latent=512,
        experts=64,
        experts_per_token=6,
        shared_d_ff=2 * 1408,
        dense_layers=1,
        dense_d_ff=10944,
        projections=2048 * 16 * 192 + _of_latent(2048, 16),
    ),
    # Their checkpoints have 8 bits.
    "deepseek-v3": Model(
        *(61, 7168, 2048, 128, 1, (512 + 64) // 2, 129280),
        weights="fp8",
        latent=512,
        experts=256,
        experts_per_token=8,
        shared_d_ff=2048,
        dense_layers=3,
        dense_d_ff=18432,
        projections=1536 * (7168 + 128 * 192) + _of_latent(7168, 128),
    ),
    "kimi-k2": Model(
        *(61, 7168, 2048, 64, 1, (512 + 64) // 2, 163840),
        weights="fp8",
        latent=512,
        experts=384,
        experts_per_token=8,
        shared_d_ff=2048,
        dense_layers=1,
        dense_d_ff=18432,
        projections=1536 * (7168 + 64 * 192) + _of_latent(7168, 64),
    ),
    "glm-4.5": Model(
        *(92, 5120, 1536, 96, 8, 128, 151552),
        experts=160,
        experts_per_token=8,
        shared_d_ff=1536,
        dense_layers=3,
        dense_d_ff=12288,
    ),
    "glm-4.5-air": Model(
        *(46, 4096, 1408, 96, 8, 128, 151552),
        experts=128,
        experts_per_token=8,
        shared_d_ff=1408,
        dense_layers=1,
        dense_d_ff=10944,
    ),
    "mixtral-8x7b": Model(32, 4096, 14336, 32, 8, 128, 32000, experts=8, experts_per_token=2),
    "opt-350m": Model(24, 1024, 4096, 16, 16, 64, 50272, gated=False, rotary=False),
    "opt-2.7b": Model(32, 2560, 10240, 32, 32, 80, 50272, gated=False, rotary=False),
    "qwen2.5-0.5b": Model(24, 896, 4864, 14, 2, 64, 151936),
    "qwen2.5-32b": Model(64, 5120, 27648, 40, 8, 128, 152064),
    "qwen3-0.6b": Model(28, 1024, 3072, 16, 8, 128, 151936),
    "qwen3-8b": Model(36, 4096, 12288, 32, 8, 128, 151936),
}
MODELS |= {
    "llama-3.1-8b": MODELS["llama-3-8b"],
    "llama-3.1-70b": MODELS["llama-3-70b"],
    "qwen2.5-7b": MODELS["qwen2-7b"],
}
