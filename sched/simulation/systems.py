"""Systems that can be simulated: a model on a device, with its cost model.

Two come with constants fitted by InferMax's authors; any other is scaled from its arithmetic and
its bytes; a measured one is read from a profile (`python -m jaxserve.profile`).
"""

from __future__ import annotations

import difflib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.sched.cost_model import (
    Coefficients,
    CostModel,
    InferMaxCostModel,
    LinearCostModel,
    Padding,
)

FORMAT = 1
MS = 1e-3


class UnknownSystem(ValueError):
    """A system that is not known or cannot be read; one line says why."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer's shape. gated: three matrices in the feed-forward, not two;
    rotary: positions are rotations of queries and keys."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    rotary: bool = True

    @property
    def layer_params(self) -> int:
        """Weights of one layer's matrices."""
        attention = 2 * self.d_model * self.head_dim * (self.heads + self.kv_heads)
        return attention + (3 if self.gated else 2) * self.d_model * self.d_ff

    @property
    def params(self) -> int:
        """Embedding and output matrices included, as if they were two."""
        return self.layers * self.layer_params + 2 * self.vocab * self.d_model

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in one layer, 16-bit."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def hidden_bytes(self) -> int:
        """The hidden vector of one token in one layer, 16-bit."""
        return self.d_model * 2


@dataclass(frozen=True)
class Device:
    """count accelerators of one kind under tensor parallelism. flops: dense 16-bit peak of one,
    1/s; bandwidth: of its memory, bytes/s; memory: bytes."""

    flops: float
    bandwidth: float
    memory: float
    count: int = 1


@dataclass(frozen=True)
class System:
    """What the simulator runs on.

    kv_tokens: M, tokens of KV cache. max_batch_tokens: C; max_prefill_tokens: P, max_rows and
    block_size: None where it does not say. paper: the cost model under the rules `infermax_paper`,
    where the authors published one. padding: the shapes that an engine rounds its batches up to.
    about: where it comes from. rho: seconds that a step takes longer for every token that it reads
    from a hidden cache instead of from K and V (Apt-Serve Eq. 6), which may be negative; None where
    hidden caches cannot be had.
    """

    name: str
    cost_model: LinearCostModel
    kv_tokens: int
    max_batch_tokens: int = 4096
    max_prefill_tokens: int | None = None
    max_rows: int | None = None
    block_size: int | None = None
    paper: InferMaxCostModel | None = None
    padding: Padding | None = None
    about: dict[str, Any] = field(default_factory=dict)
    rho: float | None = None

    def cost_under(self, rules: str) -> CostModel:
        """The cost model that goes with a set of rules (`simulator.RULES`)."""
        if rules == "infermax_paper" and self.paper is not None:
            return self.paper
        return self.cost_model

    def save(self, path: str | Path) -> None:
        """Writes the system as JSON; `load` reads it back. The paper's own cost model is not part
        of the file."""
        padding = None if self.padding is None else asdict(self.padding)
        content = {
            "format": FORMAT,
            "name": self.name,
            "num_layers": self.cost_model.num_layers,
            "gap_s": self.cost_model.gap,
            "seconds_per_layer": self.cost_model.coefficients.as_dict(),
            "kv_tokens": self.kv_tokens,
            "max_batch_tokens": self.max_batch_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "max_rows": self.max_rows,
            "block_size": self.block_size,
            "padding": padding,
            "about": self.about,
        }
        if self.rho is not None:
            content["rho"] = self.rho
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> System:
    """A system from the JSON of `System.save`. UnknownSystem names the file and what is wrong."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UnknownSystem(f"{path}: format {content['format']}, this version reads {FORMAT}")
        padding = content["padding"]
        return System(
            content["name"],
            LinearCostModel(
                Coefficients(**content["seconds_per_layer"]),
                content["num_layers"],
                content["gap_s"],
            ),
            content["kv_tokens"],
            content["max_batch_tokens"],
            content["max_prefill_tokens"],
            content["max_rows"],
            content["block_size"],
            padding=padding and Padding(tuple(padding["rows"]), tuple(padding["tokens"])),
            about=content["about"],
            rho=_rho(content.get("rho")),
        )
    except OSError as error:
        raise UnknownSystem(f"{path}: {error.strerror}") from error
    except KeyError as error:
        raise UnknownSystem(f"{path}: not a system profile, {error} is missing") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UnknownSystem):
            raise
        raise UnknownSystem(f"{path}: not a system profile ({error})") from error


def _rho(value: Any) -> float | None:
    """As a profile has it. ValueError if it is neither a number nor left out."""
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"rho must be a number of seconds, got {value!r}")
    return value


def _fitted(layers: int, *ms: float) -> LinearCostModel:
    """Milliseconds a layer, in the order in which the authors' code lists them."""
    quad, prefill_bias, per_prefill, m, kv, decode_bias, per_decode, token, token_bias = ms
    return LinearCostModel(
        Coefficients(
            per_token=token * MS,
            token_bias=token_bias * MS,
            decode_kv=kv * MS,
            decode_bias=decode_bias * MS,
            per_decode=per_decode * MS,
            prefill_quad=quad * MS,
            prefill_bias=prefill_bias * MS,
            per_prefill=per_prefill * MS,
            prefill_m=m * MS,
        ),
        layers,
    )


_LLAMA_2_7B = _fitted(
    32, 1.6773e-7, 0.0926, 0.001534, 9.224e-6, 8.513e-6, 0.01921, 0.00074, 0.00191, 0.06486
)
_LLAMA_3_70B = _fitted(
    80, 4.309e-8, 0.2112, 9.03e-4, 3.805e-7, 1.222e-6, 0.081, 3.92e-4, 0.002, 0.159
)

_AUTHORS = {"source": "constants fitted by InferMax's authors (arXiv 2411.07447, section 3.2)"}

PRESETS = {
    system.name: system
    for system in (
        System(
            "llama-2-7b@a100",
            _LLAMA_2_7B,
            kv_tokens=100_000,
            paper=InferMaxCostModel(
                _LLAMA_2_7B, (1.00667e-3 * MS, 1.16249e-5 * MS, 4.58848e-10 * MS)
            ),
            about=_AUTHORS,
        ),
        System(
            "llama-3-70b@4xa100",
            _LLAMA_3_70B,
            kv_tokens=100_000,
            max_batch_tokens=16384,
            paper=InferMaxCostModel(_LLAMA_3_70B, (0.0, 2.82553e-5 * MS, 1.89508e-11 * MS), 1.1),
            about=_AUTHORS,
        ),
    )
}

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
}

DEVICES = {
    # Data sheets: dense bf16 tensor FLOP/s, memory bytes/s, memory bytes.
    "a100": Device(312e12, 2.039e12, 80e9),
    "a100-40g": Device(312e12, 1.555e12, 40e9),
    "h100": Device(989e12, 3.35e12, 80e9),
    "h200": Device(989e12, 4.8e12, 141e9),
    "l4": Device(121e12, 0.3e12, 24e9),
    "v5e": Device(197e12, 0.819e12, 16e9),
    "v5p": Device(459e12, 2.765e12, 95e9),
    "v6e": Device(918e12, 1.64e12, 32e9),
}

_MATMUL_EFFICIENCY = 0.68  # of peak FLOP/s: the token slope of the first preset, 212 of 312 TFLOP/s
_READ_EFFICIENCY = 0.94  # of memory bandwidth: its decode KV slope, 1.92 of 2.04 TB/s
_ATTENTION_EFFICIENCY = 0.157  # of peak FLOP/s: its prefill slope, 48.8 TFLOP/s
_MEMORY_FOR_USE = 0.9  # share of the memory that weights and cache get


HIDDEN_READS = ("auto", "absorbed", "projected")


def hidden_read_of(model: Model, wanted: str = "auto") -> str | None:
    """How the model's hidden caches are read; None where a hidden vector is not smaller than K and
    V, so that nobody wants one. wanted: one of HIDDEN_READS; `auto` is absorbed where positions are
    not rotary, else projected. ValueError for a read that the model does not have."""
    if wanted not in HIDDEN_READS:
        raise ValueError(f"hidden_read must be one of {', '.join(HIDDEN_READS)}, got {wanted!r}")
    if wanted == "absorbed" and model.rotary:
        raise ValueError("hidden_read=absorbed needs a model without rotary positions")
    if model.hidden_bytes >= model.kv_bytes:
        return None
    return wanted if wanted != "auto" else ("projected" if model.rotary else "absorbed")


def scale(model: Model, device: Device, name: str = "", hidden_read: str = "auto") -> System:
    """A system from FLOPs and bytes, with the efficiencies that the Llama-2-7B preset shows.

    Per token 2 x weights FLOPs at 68% of peak; once a step the weights' bytes, a decode's K and V
    and a chunk's cached K and V at 94% of bandwidth; prefill attention 2 x heads x head_dim FLOPs a
    unit of c^2 + 2cm at 15.7% of peak; the attention kernels' biases and per-request terms as they
    are in that preset. Several devices share FLOPs and bytes evenly; their exchange is left out.
    hidden_read: see `hidden_read_of`; what hidden caches cost is derived in `_hidden_terms`.
    ValueError if the weights do not fit, or for a read that the model does not have.

    How wrong it is, against Vidur's timings of Llama-2-7B's non-attention operators on A100s (one
    layer, medians, 261 sizes from 1 to 4,096 tokens): on one device 6% mean and 28% worst relative
    error: 11% too low for 64 tokens and fewer, 12% too high between 256 and 512 (the roofline's
    knee, which no straight line has), right above. The constants that the authors fitted are 10%
    and 77% off there, and 63% too low for 64 tokens and fewer. For one device's share of 2, 4 and 8
    the mean errors are 7%, 11% and 27%, too low throughout. Against the authors' 70B constants for
    four A100s: 1% on the token slope, but decodes read KV 2.3 times too fast and prefill attention
    is 1.9 times too slow.
    """
    n = device.count
    flops, bandwidth = device.flops * n, device.bandwidth * n * _READ_EFFICIENCY
    room = device.memory * n * _MEMORY_FOR_USE - 2 * model.params
    kv_tokens = int(room // (model.kv_bytes * model.layers))
    if kv_tokens < 1:
        raise ValueError(
            f"{name or 'the model'}: weights of {2 * model.params / 1e9:.0f} GB do not fit into "
            f"{_MEMORY_FOR_USE:.0%} of {device.memory * n / 1e9:.0f} GB"
        )
    base = _LLAMA_2_7B.coefficients
    kv = model.kv_bytes / bandwidth
    read = hidden_read_of(model, hidden_read)
    hidden, projected = _hidden_terms(model, read, flops, bandwidth) if read else (0.0, 0.0)
    coefficients = Coefficients(
        per_token=2 * model.layer_params / (_MATMUL_EFFICIENCY * flops),
        token_bias=2 * model.layer_params / bandwidth,
        decode_kv=kv,
        decode_bias=base.decode_bias,
        per_decode=base.per_decode,
        prefill_quad=2 * model.heads * model.head_dim / (_ATTENTION_EFFICIENCY * flops),
        prefill_bias=base.prefill_bias,
        per_prefill=base.per_prefill,
        prefill_m=kv,
        hidden_token=hidden,
        projected_token=projected,
    )
    about = {"source": "scaled from FLOPs and bytes", "efficiencies_of": "llama-2-7b@a100"}
    if read:
        about["hidden_read"] = read
    rho = model.layers * (hidden - kv) if read else None
    cost_model = LinearCostModel(coefficients, model.layers)
    return System(name, cost_model, kv_tokens, about=about, rho=rho)


def _hidden_terms(model: Model, read: str, flops: float, bandwidth: float) -> tuple[float, float]:
    """Seconds a layer for one cached token of a hidden cache that is read, and of one that becomes
    K and V. flops: peak, bandwidth: bytes/s that a kernel reads.

    Projected (Apt-Serve section 3.1: K and V are restored for every step): 2 x d_model x the width
    of K and V FLOPs at the matrix products' 68% of peak, and the vector's bytes. Fused into the
    attention, so that K and V do not go through memory. Becoming K and V costs that and their
    bytes.

    Absorbed (Wk folded into the query, Wv applied to the weighted sum): every head attends over the
    vectors themselves, heads x d_model multiply-adds for the scores and as many for the sum, at
    the attention kernels' 15.7% of peak; a GPU's registers do not hold the sum, so two passes read
    the vector. The longer of the two counts, as they overlap.
    """
    width = 2 * model.kv_heads * model.head_dim
    project = 2 * model.d_model * width / (_MATMUL_EFFICIENCY * flops)
    project += model.hidden_bytes / bandwidth
    becomes_kv = project + model.kv_bytes / bandwidth
    if read == "projected":
        return project, becomes_kv
    arithmetic = 4 * model.heads * model.d_model / (_ATTENTION_EFFICIENCY * flops)
    return max(arithmetic, 2 * model.hidden_bytes / bandwidth), becomes_kv


def system(name: str, hidden_read: str = "auto") -> System:
    """A system by name: a preset, `MODEL@DEVICE` or `MODEL@4xDEVICE` of the known ones, or the
    path of a profile. hidden_read: how hidden caches are read, see `hidden_read_of`; a preset has
    none, a profile those it was measured with. UnknownSystem says what is known."""
    model, at, place = name.partition("@")
    if name in PRESETS or name.endswith(".json"):
        if hidden_read != "auto":
            raise UnknownSystem(f"{name}: hidden_read is for MODEL@DEVICE, not for fixed systems")
        return PRESETS[name] if name in PRESETS else load(name)
    if at and model in MODELS:
        number, times, device = place.partition("x")
        if not (times and number.isdigit()):
            number, device = "1", place
        if device in DEVICES and 1 <= int(number) <= 64:
            one = DEVICES[device]
            many = Device(one.flops, one.bandwidth, one.memory, int(number))
            try:
                return scale(MODELS[model], many, name, hidden_read)
            except ValueError as error:
                raise UnknownSystem(str(error)) from error
    near = difflib.get_close_matches(name, [*PRESETS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownSystem(
        f"there is no system {name!r}{hint}. Give MODEL@DEVICE or MODEL@4xDEVICE with a model of "
        f"{', '.join(MODELS)} and a device of {', '.join(DEVICES)}, or a profile's path (.json)"
    )
