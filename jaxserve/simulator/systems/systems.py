"""Systems by name: a model on a device, with its cost model.

Two have constants fitted by InferMax's authors; any other is scaled from its arithmetic and its
bytes, with figures fitted to measured tables if there are any; a measured one is read from a
profile (`jaxserve profile`). docs/systems.md lists them all.
"""

from __future__ import annotations

import dataclasses
import difflib

from jaxserve.sched.cache.cache_kinds import (
    ABSORBED,
    HIDDEN_READS,
    default_hidden_read,
    why_no_hidden_caches,
)
from jaxserve.sched.cost.cost_model import LinearCostModel
from jaxserve.sched.cost.hardware import DEVICES, READ_EFFICIENCY, Device, moved_slot
from jaxserve.sched.cost.model_shapes import (
    CACHE_BYTES,
    MODELS,
    WEIGHT_BYTES,
    WHOLE,
    WIDE,
    Model,
)
from jaxserve.sched.cost.profiles import System, UnknownSystem, load
from jaxserve.simulator.systems.layers import LayerWork, figures_of
from jaxserve.simulator.systems.presets import LLAMA_2_7B, PRESETS

# Efficiencies of attention and hidden caches, from the first preset, since no table has them.
_PROJECTION_EFFICIENCY = 0.68  # of peak FLOP/s: its token slope, 212 of 312 TFLOP/s
_ATTENTION_EFFICIENCY = 0.157  # of peak FLOP/s: its prefill slope, 48.8 TFLOP/s
_STATE_BYTES, _STATE_FLOPS = 4, 6  # a number, and for it in each update
_MEMORY_FOR_USE = 0.9  # share of the memory for weights and cache


def scale(model: Model, device: Device, name: str = "", hidden_read: str = "auto") -> System:
    """Derives a system from the FLOPs and bytes of a model, at the rates that measurements show.

    Beside attention, these are `layers.Figures`, fitted to Vidur's tables of A100s and H100s,
    all-reduces included; other devices get the figures of one of the two as shares of their own
    data sheets. The output matrix counts with its bytes once a step, and with its FLOPs for each
    request.

    In attention, a decode's K and V and a chunk's cached K and V are read at 94% of bandwidth, and
    prefill attention takes 2 x heads x head_dim FLOPs a unit of c^2 + 2cm at 15.7% of peak. Latent
    vectors are read absorbed, by all devices: a decode takes the longer of reading and arithmetic,
    heads x (2 x head_dim + rank) multiply-adds a token, and prefill attention has as many. The
    kernels' biases and per-request terms are those of the Llama-2-7B preset. Several devices share
    all of that evenly. Cache moves are as in `moved_slot`; those to and from the host overlap the
    steps.

    Beside attention, mean relative errors against the tables that it is fitted to (1 to 4,096
    tokens) are 8, 6, 4 and 3% on 1, 2, 4 and 8 A100s, 9, 7, 6 and 4% on H100s, and 47% at worst, at
    the roofline's knee. docs/systems.md has these, and what little is known of attention.
    Quantised weights count with the bytes that they have, read at the same share of bandwidth, and
    with the FLOPs of 16 bits; no table says better.

    Of experts a step reads as many as its tokens are expected to go to, each device a part of each,
    and a token takes the FLOPs of those that it goes to. All of them are in memory. Windows are
    ignored: a decode reads all of its cache in every layer. Layers with a state attend to nothing:
    a decode, or a chunk, reads and writes the state, however long its context is, and a token takes
    6 FLOPs a number of it, at the rate of attention. No table says how fast that is.

    Args:
        model: Its shape.
        device: Its data sheet, and how many there are.
        name: Of the system.
        hidden_read: How hidden caches are read, see `hidden_read_of` and `_hidden_terms`.

    Raises:
        ValueError: The weights do not fit, or the model does not support the read or the cache.
    """
    n = device.count
    flops, bandwidth = device.flops * n, device.bandwidth * n * READ_EFFICIENCY
    room = device.memory * n * _MEMORY_FOR_USE - model.param_bytes
    kv_tokens = int(room // (model.kv_bytes_on(n) * model.kv_layers))
    if kv_tokens < 1:
        raise ValueError(
            f"{name or 'the model'}: weights of {model.param_bytes / 1e9:.0f} GB do not fit into "
            f"{_MEMORY_FOR_USE:.0%} of {device.memory * n / 1e9:.0f} GB"
        )
    base, figures = LLAMA_2_7B.coefficients, figures_of(device.kind)
    work = LayerWork.from_model(model, n)
    step, token = figures.seconds(work, device)
    # The output matrix, which is no layer's: bytes a step, and FLOPs a token.
    output = model.vocab * model.d_model / n / model.layers
    each = 2 * output / (figures.matmul * device.flops)
    attending = model.kv_layers / model.layers
    decode = kv = attending * model.kv_bytes_on(n) / bandwidth
    attention = attending * model.heads * model.attended / (_ATTENTION_EFFICIENCY * flops)
    state = (1 - attending) * 2 * _STATE_BYTES * model.state / bandwidth
    update = (1 - attending) * _STATE_FLOPS * model.state / (_ATTENTION_EFFICIENCY * flops)
    if model.latent:
        decode = max(kv, 2 * attention)
    read = hidden_read_of(model, hidden_read)
    hidden = _hidden_terms(model, read, flops, bandwidth) if read else {}
    coefficients = dataclasses.replace(
        base,
        per_token=token + update,
        token_bias=step + model.table_bytes * output / (figures.read * device.bandwidth),
        decode_kv=decode,
        per_decode=base.per_decode + each + state,
        prefill_quad=attention,
        per_prefill=base.per_prefill + each + state,
        prefill_m=kv,
        per_expert=figures.reading(work.expert, device),
        **hidden,
        **{name: attending * cost for name, cost in moved_slot(model, device).items()},
    )
    source = "measured tables (Vidur, MIT)" if device.measured else "specification"
    about = {"source": source, "figures_of": device.kind, "attention_of": "llama-2-7b@a100"}
    if read:
        about["hidden_read"] = read
    if model.weights != WIDE:
        about["weights"] = model.weights
    if model.cache != WIDE:
        about["cache"] = model.cache
    rho = model.layers * (coefficients.hidden_token - kv) if read else None
    cost_model = LinearCostModel(
        coefficients,
        model.layers,
        overlapped=True,
        num_experts=model.experts,
        experts_per_token=model.experts_per_token,
    )
    projects = read == "projected"
    return System(
        name,
        cost_model,
        kv_tokens,
        about=about,
        rho=rho,
        projects=projects,
        state_groups=-(-model.state_layers // model.kv_layers),
        state_slots=-(-_STATE_BYTES * model.state // (model.kv_bytes // 2)),
    )


def _hidden_terms(model: Model, read: str, flops: float, bandwidth: float) -> dict[str, float]:
    """The cost model's coefficients of a cached token of a hidden cache that a decode reads, that a
    chunk reads, which is projected, and that becomes K and V. flops: peak, bandwidth: bytes/s that
    a kernel reads.

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
    project = 2 * model.d_model * width / (_PROJECTION_EFFICIENCY * flops)
    project += model.hidden_bytes / bandwidth
    becomes_kv, token = project + model.kv_bytes / bandwidth, project
    if read == "absorbed":
        arithmetic = 4 * model.heads * model.d_model / (_ATTENTION_EFFICIENCY * flops)
        token = max(arithmetic, 2 * model.hidden_bytes / bandwidth)
    return {"hidden_token": token, "hidden_prefill": project, "projected_token": becomes_kv}


def system(name: str, hidden_read: str = "auto") -> System:
    """The system of a given name.

    Args:
        name: A preset, `MODEL@DEVICE` or `MODEL@4xDEVICE` of the known ones, or the path of a
            profile. `MODEL:int4@DEVICE` has quantised weights, see `WEIGHT_BYTES`, without that
            those of its checkpoint; `MODEL:kv-int8@DEVICE` has a quantised cache, see
            `CACHE_BYTES`, or with `kv-whole` one of another shape, see `WHOLE`; both may be.
        hidden_read: How hidden caches are read, see `hidden_read_of`. Only for MODEL@DEVICE:
            presets have no hidden caches, and profiles those that they were measured with.

    Raises:
        UnknownSystem: There is no such system. The message lists the known ones.
    """
    model, at, place = name.partition("@")
    if name in PRESETS or name.endswith(".json"):
        if hidden_read != "auto":
            raise UnknownSystem(f"{name}: hidden_read is for MODEL@DEVICE, not for fixed systems")
        return PRESETS[name] if name in PRESETS else load(name)
    model, _, stored = model.partition(":")
    how = _stored(stored)
    if at and model in MODELS and how is not None:
        number, times, device = place.partition("x")
        if not (times and number.isdigit()):
            number, device = "1", place
        if device in DEVICES and 1 <= int(number) <= 64:
            one = DEVICES[device]
            many = dataclasses.replace(one, count=int(number))
            try:
                shape = MODELS[model]
                weights, cache = how
                shape = dataclasses.replace(shape, weights=weights or shape.weights)
                if cache == WHOLE:
                    shape, cache = shape.with_whole_keys(), WIDE
                shape = dataclasses.replace(shape, cache=cache)
                return scale(shape, many, name, hidden_read)
            except ValueError as error:
                raise UnknownSystem(str(error)) from error
    near = difflib.get_close_matches(name, [*PRESETS], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UnknownSystem(
        f"there is no system {name!r}{hint}. Give MODEL@DEVICE or MODEL@4xDEVICE with a model of "
        f"{', '.join(MODELS)} and a device of {', '.join(DEVICES)}, MODEL:int8, :int4 or :fp8 for "
        "quantised weights, :kv-int8 or :kv-fp8 for a quantised cache, :kv-whole for K and V in "
        "place of latent vectors, or a profile's path (.json)"
    )


def _stored(text: str) -> tuple[str, str] | None:
    """How weights and cache are stored, of "int4:kv-int8"; weights are "" if it does not say; None
    for what there is not."""
    weights, cache = "", WIDE
    for one in filter(None, text.split(":")):
        if one.startswith("kv-") and one[3:] in (*CACHE_BYTES, WHOLE) and cache == WIDE:
            cache = one[3:]
        elif one in WEIGHT_BYTES and not weights:
            weights = one
        else:
            return None
    return weights, cache


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
