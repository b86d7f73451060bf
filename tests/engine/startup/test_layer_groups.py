"""Each layer has a slot in its group, and what requests keep is what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ConfigError
from jaxserve.config.sections import LoraConfig
from jaxserve.engine.startup.choices.group_choice import choose_groups
from jaxserve.engine.startup.choices.model_options import lora_slots
from jaxserve.models.base import LayerKind, ModelConfig
from jaxserve.models.layer_groups import layer_groups
from jaxserve.models.presets import preset
from jaxserve.models.registry import family_for
from jaxserve.pallas_kernels import block_bytes
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.groups.windowed_pool import WindowedPool
from jaxserve.sched.registry import make_policy

ROOT = Path(__file__).resolve().parents[3]
BLOCK, GIB = 16, 1 << 30
MINISTRAL = {  # of the checkpoint's config.json
    "model_type": "ministral",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "sliding_window": 32768,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 9,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "eos_token_id": 2,
}


def model(name: str) -> ModelConfig:
    hf = MINISTRAL if name.startswith("Ministral") else preset(name)
    return family_for(hf).config_from_hf(hf)


def plain(windows: list[int | None], *, causal: bool = True) -> ModelConfig:
    kinds = tuple(LayerKind(None, window) for window in windows)
    sizes = dict.fromkeys(("vocab_size", "d_model", "d_ff", "num_heads", "num_kv_heads"), 8)
    more = {"head_dim": 8, "max_position": 64, "attn_scale": 1.0, "norm_eps": 1e-5}
    return ModelConfig(
        family="llama", num_layers=len(windows), kinds=kinds, causal=causal,
        tied=True, init_std=0.02, **sizes, **more,
    )  # fmt: skip


@given(st.lists(st.sampled_from([None, None, 4, 9]), min_size=1, max_size=40))
def test_every_layer_has_a_slot(windows: list[int | None]) -> None:
    groups = layer_groups(plain(windows))
    if len({window is None for window in windows}) < 2:
        assert groups is None
        return
    assert groups is not None
    assert layer_groups(plain(windows, causal=False)) is None
    assert len(set(groups.places)) == len(windows)
    assert groups.window == max(filter(None, windows))
    for window, (group, slot) in zip(windows, groups.places, strict=True):
        assert (group == 0) == (window is None)
        assert slot < groups.slots == windows.count(None)
    assert groups.planes == 2 * (1 + max(group for group, _ in groups.places))


def held(config: ModelConfig, tokens: int) -> tuple[int, int, float]:
    """Bytes of a request that decodes: with one list, with groups, and what it must keep."""

    def one_block(layers: int) -> int:
        return block_bytes(layers, config.num_kv_heads, BLOCK, config.head_dim, "bfloat16")

    groups = layer_groups(config)
    assert groups is not None
    pool = WindowedPool(1 << 20, BLOCK, 1, tokens // BLOCK, groups=groups.beside, ahead=8192)
    pool.open_cache(0, 0)  # type: ignore[arg-type]
    pool.grow(0, tokens)
    pool.first[0] = pool.ends[0] = groups.beside.behind(tokens - 1, BLOCK)
    kept = [
        min(window or tokens, tokens) for window in (k.sliding_window for k in config.layer_kinds)
    ]
    return (
        one_block(config.num_layers) * int(blocks_for(tokens, BLOCK)),
        one_block(groups.slots) * pool.num_used,
        one_block(1) * 2 * sum(kept) / BLOCK,
    )


def test_the_page_says_what_requests_keep() -> None:
    rows = re.findall(
        r"^\| `?([\w.-]+?)`? \| ([\d,]+) \| ([\d.]+) GiB \| ([\d.]+) GiB \| ([\d.]+) \|$",
        (ROOT / "docs" / "models.md").read_text(),
        re.MULTILINE,
    )
    assert [tokens for _, tokens, *_ in rows] == ["32,768", "131,072"] * 3
    for name, tokens, *said in rows:
        alike, grouped, least = held(model(name), int(tokens.replace(",", "")))
        found = f"{alike / GIB:.2f}", f"{grouped / GIB:.2f}", f"{grouped / least:.3f}"
        assert found == tuple(said), (name, tokens)
        assert grouped / least <= 1.06


def test_what_layers_with_a_state_do_not_allow() -> None:
    config = model("qwen3-next-80b")
    sizes = {"max_len": 4096, "block_size": BLOCK}
    groups = choose_groups(config, make_policy("sarathi+spec"), "sarathi+spec", **sizes)
    assert groups is not None, "they may draft"
    with pytest.raises(ConfigError, match=r"scheduler.policy=bros lends blocks.*layer_types"):
        choose_groups(config, make_policy("bros"), "bros", **sizes)
    hf = preset("qwen3-next-80b")
    with pytest.raises(ConfigError, match=r"lora: .*layer_types"):
        lora_slots(LoraConfig(max_loras=2), family_for(hf), config)
    with pytest.raises(ValueError, match="is_causal"):
        family_for(hf).config_from_hf({**hf, "is_causal": False})
