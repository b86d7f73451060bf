"""Presets, scaling, and profiles on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.models.layer_groups import layer_groups
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.sched.cost.cost_model import BatchFeatures, Coefficients, LinearCostModel
from jaxserve.sched.cost.hardware import DEVICES
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.model_shapes import MODELS
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.profiles import System, UnknownSystem, load
from jaxserve.simulator.simulator import state_groups
from jaxserve.simulator.systems.layers import figures_of
from jaxserve.simulator.systems.systems import hidden_read_of, scale, system

MS = 1e-3


def test_the_7b_preset_gives_the_papers_times() -> None:
    seven = system("llama-2-7b@a100")
    decode = BatchFeatures(10, 10, 5000, 10, 0, 0, 0)
    layer = 10 * 0.00191 + 0.06486 + 5000 * 8.513e-6 + 0.01921 + 10 * 0.00074
    assert seven.cost_model.batch_time(decode) == pytest.approx(32 * layer * MS)
    residual = 1.00667e-3 + 1.16249e-5 * 16 + 4.58848e-10 * 256
    paper = seven.cost_under("infermax_paper").batch_time(decode)
    assert paper == pytest.approx(32 * (layer + residual) * MS)
    assert seven.cost_under("jaxserve") is seven.cost_model


def test_the_70b_presets_attention_costs_a_tenth_more_for_several() -> None:
    seventy = system("llama-3-70b@4xa100")
    assert (seventy.max_batch_tokens, seventy.kv_tokens) == (16384, 100_000)
    prefill = BatchFeatures(2048, 2048, 0, 0, 2 * 1024**2, 2, 0)
    attention = 0.2112 + 2 * 1024**2 * 4.309e-8
    layer = 2048 * 0.002 + 0.159 + 1.1 * attention + 2 * 9.03e-4
    layer += 2.82553e-5 * 2048 + 1.89508e-11 * 2048**2
    found = seventy.cost_under("infermax_paper").batch_time(prefill)
    assert found == pytest.approx(80 * layer * MS)


def test_attention_is_the_presets_where_that_comes_from() -> None:
    scaled = scale(MODELS["llama-2-7b"], DEVICES["a100"]).cost_model.coefficients.as_dict()
    fitted = system("llama-2-7b@a100").cost_model.coefficients.as_dict()
    for name in ("decode_kv", "prefill_quad", "decode_bias", "prefill_bias"):
        assert scaled[name] == pytest.approx(fitted[name], rel=0.01), name
    assert scaled["prefill_m"] == pytest.approx(fitted["prefill_m"], rel=0.1)
    assert scaled["per_token"] == pytest.approx(fitted["per_token"], rel=0.1)


def test_attention_follows_flops_and_bytes() -> None:
    slow, fast = DEVICES["a100"], DEVICES["h100"]
    a = scale(MODELS["llama-3-8b"], slow).cost_model.coefficients
    h = scale(MODELS["llama-3-8b"], fast).cost_model.coefficients
    assert a.prefill_quad / h.prefill_quad == pytest.approx(fast.flops / slow.flops)
    assert a.decode_kv / h.decode_kv == pytest.approx(fast.bandwidth / slow.bandwidth)
    four = scale(MODELS["llama-3-8b"], replace(slow, count=4)).cost_model.coefficients
    assert a.decode_kv / four.decode_kv == pytest.approx(4)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("llama-2-7b@a100", 32),
        ("llama-2-7b@1xa100", 32),
        ("llama-3-70b@4xa100", 4 * 32),
        ("llama-3-70b@2xa100", 2 * 32),
        ("llama-3-8b@h100", 64),
        ("llama-3-8b@h200", 64),
        ("llama-3-8b@8xv5e", 8 * 16),
        ("llama-3-8b@v5p", 16),
        ("llama-3-8b@v6e", 32),
    ],
)
@pytest.mark.parametrize("rules", ["jaxserve", "infermax_paper"])
def test_swapping_takes_what_the_links_to_the_host_do(
    name: str, gigabytes: float, rules: str
) -> None:
    """At four fifths of their peaks, all shards at a time, both ways, beside the batch."""
    model = system(name).cost_under(rules)
    decode = BatchFeatures(10, 10, 5000, 10, 0, 0, 0)
    slots = 2 * 1_000_000  # K and V of a million tokens
    size = slots // 2 * MODELS[name.partition("@")[0]].kv_bytes * system(name).cost_model.num_layers
    for moved in ({"saved_slots": slots}, {"loaded_slots": slots, "saved_slots": slots // 2}):
        took = model.batch_time(decode._replace(**moved))
        assert took == pytest.approx(size / (0.8 * gigabytes * 1e9))
    few = decode._replace(saved_slots=2, loaded_slots=2)
    assert model.batch_time(few) == model.batch_time(decode)
    copied = decode._replace(copied_slots=1)
    assert model.batch_time(copied) > model.batch_time(decode)


def test_the_output_matrix_counts_once_a_step_and_for_each_request() -> None:
    """Llama 3 has 128,256 tokens, Llama 2 32,000; else the two would be alike."""
    large = MODELS["llama-3-8b"]
    a, b = (
        scale(replace(large, vocab=vocab), DEVICES["a100"]).cost_model for vocab in (128256, 32000)
    )
    more = 2 * 4096 * (128256 - 32000)  # FLOPs a token, and bytes
    figures = figures_of("a100")
    empty = BatchFeatures(0, 0, 0, 0, 0, 0, 0)
    assert a.batch_time(empty) - b.batch_time(empty) == pytest.approx(
        more / (figures.read * 2.039e12)
    )
    ten = BatchFeatures(10, 10, 10, 10, 0, 0, 0)
    assert a.batch_time(ten) - b.batch_time(ten) == pytest.approx(
        more / (figures.read * 2.039e12) + 10 * more / (figures.matmul * 312e12)
    )


def test_of_experts_those_that_tokens_go_to_are_read_and_all_are_in_memory() -> None:
    shape = MODELS["mixtral-8x7b"]
    expert = 3 * 4096 * 14336
    assert shape.layer_params == pytest.approx(8 * expert + 2 * 4096 * 128 * 40 + 4096 * 8)
    model = system("mixtral-8x7b@2xa100")
    assert model.kv_tokens == pytest.approx(
        (0.9 * 160e9 - 2 * 46.7e9) / (2 * 8 * 128 * 2 * 32), 0.01
    )
    dense = scale(replace(shape, experts=0, experts_per_token=0), replace(DEVICES["a100"], count=2))
    read = figures_of("a100").read * 2.039e12
    one, many = (BatchFeatures(n, n, 0, n, 0, 0, 0) for n in (1, 1000))

    def more(batch: BatchFeatures) -> float:
        found = model.cost_model.batch_time(batch) - dense.cost_model.batch_time(batch)
        return float(found) / 32

    # A token goes to two experts, many go to all; each of them computes and activates two.
    assert more(one) == pytest.approx(expert / read, rel=0.01)
    each = 2 * expert / 2 / (figures_of("a100").matmul * 312e12)
    each += 2 * 3 * 14336 / 2 / (figures_of("a100").elementwise * 2.039e12)
    assert more(many) - more(one) == pytest.approx(6 * expert / read + 999 * each, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-2-7b", 6.7),
        ("llama-3-70b", 70.6),
        ("gemma-3-27b", 28.4),  # with its table of 1.4 billion twice
        ("qwen3-30b-a3b", 30.5),
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v3", 671),
        ("kimi-k2", 1026),
        ("glm-4.5", 353),
        ("glm-4.5-air", 106.9),
        ("mixtral-8x7b", 46.7),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
        ("qwen3-next-80b", 79.7),
    ],
)
def test_the_models_have_their_sizes(name: str, billions: float) -> None:
    assert MODELS[name].params / 1e9 == pytest.approx(billions, rel=0.02)


def test_the_cache_is_what_the_weights_leave() -> None:
    thirteen = system("opt-13b@a100-40g")
    # 36 GB less 26 GB of weights, at 2 x 5120 x 2 x 40 bytes a token.
    assert thirteen.kv_tokens == pytest.approx((36e9 - 26e9) / 819_200, rel=0.06)
    with pytest.raises(UnknownSystem, match="do not fit"):
        system("llama-3-70b@a100")
    assert system("llama-3-70b@2xh200").kv_tokens > 100_000


def test_weights_are_those_of_the_checkpoint_unless_the_name_says() -> None:
    """DeepSeek V3's have 8 bits, and fit into eight H200."""
    own, wide = system("deepseek-v3@8xh200"), system("deepseek-v3:16-bit@16xh200")
    assert (own.about["weights"], "weights" in wide.about) == ("fp8", False)
    assert own.kv_tokens == system("deepseek-v3:fp8@8xh200").kv_tokens
    left = 0.9 * 8 * 141e9 - MODELS["deepseek-v3"].param_bytes
    assert own.kv_tokens == int(left // (8 * 61 * 2 * (512 + 64)))
    with pytest.raises(UnknownSystem, match="1342 GB do not fit"):
        system("deepseek-v3:16-bit@8xh200")


def test_states_are_read_whatever_the_context() -> None:
    """36 of 48 layers have a state of 2.1 MiB; the other 12 have 2 KiB of K and V a token."""
    shape, place = MODELS["qwen3-next-80b"], system("qwen3-next-80b@4xh100")
    left = 0.9 * 4 * 80e9 - shape.param_bytes
    assert place.kv_tokens == int(left // (12 * 2048))
    groups = state_groups(place, 16)
    assert groups is not None and (groups.count, groups.blocks) == (3, 134)
    family = family_for(preset("qwen3-next-80b"))
    model = family.config_from_hf(preset("qwen3-next-80b"))
    own = layer_groups(model)
    assert own is not None and own.for_pool(model, 2, 16, "bfloat16").beside == groups
    assert family.num_params(model) / 1e9 == pytest.approx(79.7, rel=0.01)
    cost, other = place.cost_model.coefficients, system("qwen3-30b-a3b@4xh100").cost_model
    bandwidth = 4 * 3.35e12 * 0.94
    assert cost.decode_kv * 48 == pytest.approx(12 * 2048 / bandwidth)
    more = cost.per_decode - other.coefficients.per_decode
    assert more * 48 == pytest.approx(36 * 2 * 4 * shape.state / bandwidth, rel=0.01)


def test_latent_vectors_are_on_every_device() -> None:
    """576 numbers a token, which all heads read: 288 of K and of V, and 512 of them as values."""
    shape, number = MODELS["deepseek-v2-lite"], 27 * 2 * (512 + 64)
    assert shape.kv_bytes * shape.layers == number == 31_104
    one, two = (system(f"deepseek-v2-lite@{n}h200") for n in ("", "2x"))
    left = 0.9 * 141e9 - shape.param_bytes
    assert one.kv_tokens == int(left // number)
    assert two.kv_tokens == int((0.9 * 2 * 141e9 - shape.param_bytes) // (2 * number))
    a, b = (place.cost_model.coefficients for place in (one, two))
    assert (a.prefill_m, a.swapped_slot) == pytest.approx((b.prefill_m, b.swapped_slot))
    assert a.prefill_quad == pytest.approx(2 * b.prefill_quad)
    # Reading takes longer than arithmetic, but not for eight times the heads.
    assert a.decode_kv == a.prefill_m
    many = scale(replace(shape, heads=128), DEVICES["h200"]).cost_model.coefficients
    assert many.decode_kv == pytest.approx(2 * many.prefill_quad) and many.decode_kv > a.decode_kv
    # 512 numbers of 8 bits, a scale for each half, and 64 of 16.
    for dtype, number in (("fp8", 512 + 2 * 64), ("int8", 512 + 2 * 4 + 2 * 64)):
        assert replace(shape, cache=dtype).kv_bytes == number
        small = system(f"deepseek-v2-lite:kv-{dtype}@h200")
        assert small.kv_tokens == int(left // (27 * number))
        assert small.cost_model.coefficients.prefill_m == pytest.approx(a.prefill_m * number / 1152)
    # K and V of 16 heads, both as wide as K.
    whole = system("deepseek-v2-lite:kv-whole@h200")
    assert whole.kv_tokens == int(left // (324 << 10))
    assert whole.cost_model.coefficients.prefill_quad < b.prefill_quad
    with pytest.raises(UnknownSystem, match="only latent vectors can be made so"):
        system("llama-3-8b:kv-whole@h200")


@pytest.mark.parametrize("name", ["llama-2-7b@a1000", "gpt@a100", "nothing", "llama-2-7b@0xa100"])
def test_unknown_systems_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownSystem, match=r"there is no system .*llama-2-7b"):
        system(name)


def measured() -> System:
    model = LinearCostModel(Coefficients(1e-6, 2e-5, 3e-9, 0, 0, 1e-10, 0, 0, 0), 4)
    padding = Padding((1, 8), (16, 64), decode_group=8, decode_chunk=32)
    host = HostOverhead(plan=1e-4, finish_row=2e-6)
    about = {"device": "cpu"}
    return System("tiny@cpu", model, 4096, 64, 32, 8, 16, padding=padding, host=host, about=about)


def mixture() -> System:
    priced = replace(measured().cost_model.coefficients, per_expert=1e-6)
    model = LinearCostModel(priced, 4, num_experts=8, experts_per_token=2)
    return replace(measured(), cost_model=model)


@pytest.mark.parametrize(
    "place",
    [
        measured(),
        replace(measured(), cost_model=replace(measured().cost_model, overlapped=True)),
        replace(measured(), rho=-1e-9, projects=True),
        mixture(),
        system("opt-13b@a100-40g"),
    ],
)
def test_a_profile_survives_the_disk(tmp_path: Path, place: System) -> None:
    path = tmp_path / "tiny.json"
    place.save(path)
    assert load(path) == place == system(str(path))
    written = json.loads(path.read_text())
    assert ("rho" in written) == (place.rho is not None)
    # Files of dense models are as they were before there were any others.
    assert ("expert" in path.read_text()) == (place.cost_model.experts != (0, 0))


def test_more_experts_for_a_token_than_there_are_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    mixture().save(path)
    path.write_text(path.read_text().replace('"experts_per_token": 2', '"experts_per_token": 9'))
    with pytest.raises(UnknownSystem, match="experts_per_token must be 1 to num_experts, 8, got 9"):
        load(path)


def test_a_projected_token_costs_its_products() -> None:
    """OPT-13B: 5,120 wide, K and V together 10,240; 68% of 312 TFLOP/s, 94% of 1.555 TB/s."""
    model, device = MODELS["opt-13b"], DEVICES["a100-40g"]
    k = scale(model, device, hidden_read="projected").cost_model.coefficients
    read = 2 * 5120 / (0.94 * 1.555e12)
    restore = 2 * 5120 * 10_240 / (0.68 * 312e12) + read
    assert k.hidden_token == pytest.approx(restore)
    assert k.projected_token == pytest.approx(restore + 2 * read)  # K and V, 5,120 wide each


def test_an_absorbed_token_costs_its_reads_or_its_arithmetic() -> None:
    device = DEVICES["a100-40g"]
    small = scale(MODELS["opt-125m"], device)
    k = small.cost_model.coefficients
    assert k.hidden_token == pytest.approx(k.decode_kv)  # two passes over half the bytes
    assert small.rho == pytest.approx(0.0)
    large = scale(MODELS["opt-13b"], device)
    arithmetic = 4 * 40 * 5120 / (0.157 * 312e12)
    assert large.cost_model.coefficients.hidden_token == pytest.approx(arithmetic)


def test_rho_is_what_a_batch_of_one_token_more_takes_longer() -> None:
    for read in ("absorbed", "projected"):
        place = system("opt-13b@a100-40g", read)
        kv = BatchFeatures(4, 4, 4000, 4, 0, 0, 0)
        hidden = BatchFeatures(4, 4, 3000, 4, 0, 0, 0, hidden_tokens=1000)
        longer = place.cost_model.batch_time(hidden) - place.cost_model.batch_time(kv)
        assert place.rho is not None
        assert longer == pytest.approx(1000 * place.rho)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("opt-13b", "absorbed"),
        ("llama-2-7b", "projected"),
        ("llama-3-8b", None),
        ("yi-6b", None),
    ],
)
def test_rotary_models_project_and_grouped_query_models_have_none(
    name: str, read: str | None
) -> None:
    assert hidden_read_of(MODELS[name]) == read
    place = scale(MODELS[name], DEVICES["a100"])
    assert (place.rho is None) == (read is None)
    assert (place.cost_model.coefficients.hidden_token > 0) == (read is not None)
    assert place.projects == (read == "projected")


def test_reads_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UnknownSystem, match="without rotary positions"):
        system("llama-2-7b@h100", "absorbed")
    with pytest.raises(UnknownSystem, match="must be one of auto"):
        system("opt-13b@h100", "folded")
    with pytest.raises(UnknownSystem, match="fixed systems"):
        system("llama-2-7b@a100", "projected")
    assert system("llama-2-7b@a100").rho is None


def test_quantised_weights_leave_more_room_and_take_less_time() -> None:
    wide, int8, int4 = (system(f"opt-13b{how}@a100") for how in ("", ":int8", ":int4"))
    assert wide.kv_tokens < int8.kv_tokens < int4.kv_tokens
    saved = MODELS["opt-13b"].param_bytes - replace(MODELS["opt-13b"], weights="int4").param_bytes
    more = (int4.kv_tokens - wide.kv_tokens) * MODELS["opt-13b"].kv_bytes * 40
    assert more == pytest.approx(saved, rel=1e-4)
    step, per_token = (
        [getattr(one.cost_model.coefficients, name) for one in (wide, int8, int4)]
        for name in ("token_bias", "per_token")
    )
    assert step[0] > 1.7 * step[1] > 1.7 * 1.3 * step[2]
    assert len(set(per_token)) == 1
    assert int4.about["weights"] == "int4" and "weights" not in wide.about
    assert wide.rho is not None and int4.rho is None  # no hidden caches
    system("llama-3-70b:int4@a100")
    with pytest.raises(UnknownSystem, match="do not fit"):
        system("llama-3-70b@a100")
    with pytest.raises(UnknownSystem, match="MODEL:int8, :int4 or :fp8"):
        system("opt-13b:int3@a100")


def test_quantised_caches_hold_more_and_are_read_faster() -> None:
    wide, int8, fp8 = (system(f"llama-3-8b{how}@a100") for how in ("", ":kv-int8", ":kv-fp8"))
    assert int8.kv_tokens == pytest.approx(2 * 128 / (128 + 4) * wide.kv_tokens, rel=1e-4)
    assert fp8.kv_tokens == pytest.approx(2 * wide.kv_tokens, rel=1e-4)
    kv, moved = (
        [getattr(one.cost_model.coefficients, name) for one in (wide, int8, fp8)]
        for name in ("decode_kv", "swapped_slot")
    )
    assert kv[0] == pytest.approx(2 * kv[2]) and kv[2] < kv[1] < kv[0]
    assert moved[0] == pytest.approx(2 * moved[2])
    both = system("opt-13b:int4:kv-fp8@a100")
    assert (both.about["weights"], both.about["cache"]) == ("int4", "fp8")
    # As engines have it, hidden caches of 8 bits are for those who ask.
    assert system("opt-13b:kv-int8@a100").rho is None
    assert system("opt-13b:kv-int8@a100", "absorbed").rho is not None
    for name in ("opt-13b:kv-int4@a100", "opt-13b:kv-int8:kv-fp8@a100", "opt-13b:int4:int8@a100"):
        with pytest.raises(UnknownSystem, match=":kv-int8 or :kv-fp8"):
            system(name)
