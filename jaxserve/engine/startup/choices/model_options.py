"""What is decided about the model before anything is loaded: its shape, dtype, tokenizer, the
longest request, its devices, and how hidden caches are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxserve.config import (
    AUTO,
    Config,
    ConfigError,
    LoraConfig,
    SchedulerConfig,
    ServedModelConfig,
)
from jaxserve.engine.device.sampling_state import MAX_EOS
from jaxserve.models import sharding
from jaxserve.models.base import Family, ModelConfig, with_quantization, with_wide_head
from jaxserve.models.lora import LoraSlots, adapter_bytes, adapter_specs, projections
from jaxserve.models.quantized import Quantization
from jaxserve.sched.cache.cache_kinds import ABSORBED, default_hidden_read, why_no_hidden_caches
from jaxserve.sched.cost.cost_model_fit import NO_EXPERTS
from jaxserve.sched.policy import Policy
from jaxserve.sched.registry import make_policy
from jaxserve.weights import checkpoint_dtype, load_config, load_preset

log = logging.getLogger(__name__)

Shape = tuple[Family, ModelConfig, dict[str, Any]]  # family, config, Hugging Face's config
INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # Linux's names, x86 and Arm


@dataclass(frozen=True)
class ServedModel:
    """The model that is served, before it is decided how it runs.

    Attributes:
        family: the model's.
        config: its shape, for requests of up to max_len tokens.
        hf: its Hugging Face config.
        mesh: as in `StepModel`.
        shards: devices that share each layer.
        max_len: tokens of the longest request.
    """

    family: Family
    config: ModelConfig
    hf: dict[str, Any]
    mesh: Mesh | None
    shards: int
    max_len: int


def for_model(config: Config, model: ModelConfig) -> Config:
    """The configuration as the model needs it. One whose tokens see those behind them needs prompts
    that are computed in one step, and finds no prefixes: with more behind it, none is the same."""
    if model.causal:
        return config
    fields: dict[str, Any] = {"cache__prefix_caching": False}
    if config.scheduler.policy == SchedulerConfig().policy:
        fields["scheduler__policy"] = "vllm"
    elif make_policy(config.scheduler.policy, **config.scheduler.params).chunked:
        raise ConfigError(
            f"scheduler.policy={config.scheduler.policy} computes prompts in parts, and this "
            "model's tokens see those behind them (is_causal in its config.json); take vllm"
        )
    if not config.engine.max_model_len:
        longest = min(model.max_position, config.scheduler.max_batch_tokens)
        fields["engine__max_model_len"] = longest
    log.info(
        "tokens of this model see those behind them: it makes vectors only, of whole prompts, with "
        "scheduler.policy=%s and without prefix caching",
        fields.get("scheduler__policy", config.scheduler.policy),
    )
    return config.with_fields(**fields)


def choose_model(shape: Shape, max_model_len: int, tensor: int) -> ServedModel:
    """The model and its devices. shape: of `load_shape`. max_model_len: `engine.max_model_len`.
    tensor: `mesh.tensor`. Raises ConfigError."""
    family, model, hf = shape
    _check_ends(model)
    max_len = choose_max_len(max_model_len, model)
    model = model.for_length(max_len)
    sharding.check_tensor(model, tensor)
    mesh = sharding.make_mesh(tensor) if tensor > 1 else None
    return ServedModel(
        family=family, config=model, hf=hf, mesh=mesh, shards=tensor, max_len=max_len
    )


def load_shape(served: ServedModelConfig) -> Shape:
    """The family, the model's config and its Hugging Face config, from the checkpoint, or from a
    preset for random weights. Raises ConfigError if neither is named, or the weights cannot be
    quantised as configured; CheckpointError if it cannot be read."""
    family, model, hf = _load_shape(served)
    try:
        model = with_quantization(family, model, served.quantization)
    except ValueError as error:
        raise ConfigError(f"model.quantization: {error}") from None
    on_cpu = jax.default_backend() == "cpu"
    if model.experts is not None and model.quantization is not None and not on_cpu:
        raise ConfigError(
            f"model.quantization={served.quantization}: only CPUs have kernels of a mixture of "
            "experts in few bits"
        )
    # Only CPUs have a kernel of it: others would write it out wide in each step.
    return family, model if on_cpu else with_wide_head(family, model), hf


def _load_shape(served: ServedModelConfig) -> Shape:
    if served.path:
        return load_config(served.path)
    if served.load_format != "random":
        raise ConfigError(
            "model.path is empty: give a checkpoint directory, or model.preset with "
            "model.load_format=random"
        )
    if not served.preset:
        raise ConfigError("model.preset is empty: random weights need a shape, such as opt-125m")
    return load_preset(served.preset)


def _check_ends(model: ModelConfig) -> None:
    count = len(model.eos_token_ids)
    if count > MAX_EOS:
        raise ConfigError(
            f"the checkpoint has {count} end-of-sequence ids; at most {MAX_EOS} can be served"
        )


def choose_dtype(
    name: str,
    hf: dict[str, Any],
    *,
    hidden: bool = False,
    quantization: Quantization | None = None,
) -> jnp.dtype:
    """The dtype of parameters.

    auto is the checkpoint's own dtype, with two exceptions. TPUs, which do not compute in float16,
    use bfloat16 instead. CPUs use float32, unless the processor has instructions for bfloat16,
    there are no hidden caches, whose reads would convert parts of the weights at every call, and

    - the checkpoint is bfloat16, so that nothing is lost, or
    - its weights have 8 or 4 bits, whose kernels want rows of bfloat16: one of float32 counts as
      two. It is logged, since such rows are rounded.

    Args:
        name: `model.dtype`.
        hf: the checkpoint's config.
        hidden: whether there are hidden caches.
        quantization: which weights are stored in few bits; None for none.
    """
    if name != AUTO:
        return jnp.dtype(name)
    stored = checkpoint_dtype(hf)
    if jax.default_backend() == "cpu":
        few = quantization is not None and quantization.scheme.kind != "fp8"
        if hidden or not (few or stored == jnp.bfloat16) or not has_instructions():
            return jnp.dtype(jnp.float32)
        if few and stored != jnp.bfloat16:
            log.info(
                "activations are rounded to bfloat16 for weights of 8 and 4 bits; "
                "model.dtype=float32 multiplies them as they are, slower"
            )
        return jnp.dtype(jnp.bfloat16)
    stored = stored or jnp.dtype(jnp.bfloat16)
    on_tpu = jax.default_backend() == "tpu"
    return jnp.dtype(jnp.bfloat16) if on_tpu and stored == jnp.float16 else stored


def choose_max_len(wanted: int, model: ModelConfig) -> int:
    """The most tokens of a request, prompt and output. wanted: `engine.max_model_len`, 0 for all
    positions of the model. Raises ConfigError beyond them."""
    if wanted != 0 and not 2 <= wanted <= model.max_position:
        raise ConfigError(
            f"engine.max_model_len must be 2 to the model's {model.max_position} positions (0 for "
            f"all of them), got {wanted}"
        )
    return wanted or model.max_position


def has_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 products, by its instruction set. Not by timing, which
    depends on what else the machine does: the dtype decides outputs, step times and which steps are
    compiled already (docs/performance.md compares both dtypes). False if Linux does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = (line.partition(":") for line in lines)
    found = (value.split() for key, _, value in flags if key.strip() in ("flags", "Features"))
    return not INSTRUCTIONS.isdisjoint(next(found, []))


def choose_read(wanted: str, policy_name: str, policy: Policy, config: ModelConfig) -> str | None:
    """How hidden caches are read: absorbed or projected. None if there are none, because the policy
    plans none or the model gains nothing from them (which is logged once).

    Args:
        wanted: `cache.hidden_read`.
        policy_name: name of the policy, for messages.
        policy: the scheduling policy.
        config: the model.

    Raises:
        ConfigError: `wanted` is not auto and cannot be had.
    """
    field = f"cache.hidden_read={wanted}"
    if not policy.hybrid_cache:
        if wanted != AUTO:
            raise ConfigError(f"{field}: scheduler.policy={policy_name} keeps KV caches only")
        return None
    reason = why_no_hidden_caches(
        config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    )
    if config.quantization is not None:
        reason = "its weights are quantised, and hidden caches read those of K and V as they are"
    if not config.plain_keys:
        reason = (
            "its layers differ in rotation or window, its scores are capped or have sinks, or its "
            "keys are normalised, rotated or projected as hidden caches do not"
        )
    if reason is not None:
        if wanted != AUTO:
            raise ConfigError(f"{field}: {reason}")
        log.info("no hidden caches, all are KV: %s", reason)
        return None
    rotary = config.rope is not None
    if wanted == ABSORBED and rotary:
        raise ConfigError(
            f"{field}: the model rotates its keys by position, so Wk cannot be folded into the "
            "query; use projected"
        )
    if wanted != AUTO:
        return wanted
    return default_hidden_read(rotary=rotary)


def given_rho(text: str, read: str | None) -> float | None:
    """The number in cache.rho; None for auto. read: how hidden caches are read. Raises ConfigError
    for a number if there are no hidden caches (None)."""
    if text == AUTO:
        return None
    if read is None:
        raise ConfigError(f"cache.rho={text}: there are no hidden caches here, only KV")
    return float(text)


def lora_slots(lora: LoraConfig, family: Family, model: ModelConfig) -> LoraSlots | None:
    """Room for adapters as configured; None for none. Raises ConfigError for a target that the
    model does not have, and for models that have no adapters here."""
    if not lora.slots:
        return None
    if model.delta is not None:
        raise ConfigError(
            "lora: adapters are not served with models whose layers keep a state (layer_types in "
            "config.json)"
        )
    known = dict.fromkeys(one.target for one in projections(family, model, fused=True))
    for target in lora.targets:
        if target not in known:
            raise ConfigError(
                f"lora.target_modules: {target!r:.80} is no projection of this model; it has "
                f"{', '.join(known)}"
            )
    return LoraSlots(lora.slots, lora.max_rank, lora.targets)


def lora_bytes(
    family: Family,
    model: ModelConfig,
    slots: LoraSlots | None,
    dtype: DTypeLike,
    mesh: Mesh | None,
) -> int:
    """Bytes of the room for adapters on each device.

    Args:
        family: the model's.
        model: its shape.
        slots: the room; None for none.
        dtype: that adapters are kept in.
        mesh: the devices that they are sharded over; None for one.
    """
    if slots is None:
        return 0
    return adapter_bytes(adapter_specs(family, model, slots, fused=True), dtype, mesh)


def experts_of(model: ModelConfig) -> tuple[int, int]:
    """`LinearCostModel.experts` of a model."""
    experts = model.experts
    return NO_EXPERTS if experts is None else (experts.num_experts, experts.experts_per_token)
