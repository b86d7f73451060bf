"""How large the pool's array is: every compiled step is of one size of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import Config
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.startup.build import build_engine
from jaxserve.engine.startup.choices import memory_choice
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.choices.pool_size import (
    Demand,
    Room,
    array_blocks,
    pool_blocks,
    pool_room,
)
from jaxserve.engine.startup.start_cache import POOLS, StartCache, key_of
from jaxserve.models.base import Experts
from jaxserve.pallas_kernels.backends import platform_backend
from jaxserve.weights import load_config, load_preset
from tests.engine.harness import SAMPLING, engine, generate, prompts


def demand(num_blocks: int = 0, rows: int = 1 << 40) -> Demand:
    return Demand(num_blocks, 16, 0, 0.9, rows, 16, 64)


@given(st.integers(2, 10**9), st.integers(1, 10**9), st.floats(1, 100))
def test_it_holds_what_was_asked_for_and_wastes_little(
    blocks: int, more: int, times: float
) -> None:
    room = Room(blocks + more, int((blocks + more) * times))
    asked = array_blocks(demand(blocks), room)
    assert blocks <= asked <= room.allowed
    assert asked <= blocks * 17 / 16 + 1 or asked <= min(2 * blocks, room.free // 16)
    exact = Room(blocks, int(blocks * times))
    assert array_blocks(demand(blocks), exact) == pool_blocks(demand(blocks), exact) == blocks
    fitting = array_blocks(demand(), room)
    assert room.allowed * 15 / 16 - 1 <= fitting <= room.allowed


def test_rows_of_experts_take_memory_that_the_pool_does_not_get(shapes: dict[str, Path]) -> None:
    model = load_config(shapes["moe"])[1]
    assert model.experts is not None
    given: dict[str, Any] = {"weights": 0, "pool_heads": 2, "shards": 1, "device": ("cpu", 1 << 30)}

    def blocks(experts: Experts | None) -> int:
        config = dataclasses.replace(model, experts=experts)
        return pool_room(demand(rows=8), config, "float32", platform="cpu", **given).free

    # 64 tokens, each in one more row of width 32 in and out of an expert of width 32.
    fewer = dataclasses.replace(model.experts, experts_per_token=1)
    assert blocks(None) > blocks(fewer) > blocks(model.experts)


def test_no_pool_of_8_bits_is_where_gpus_kernels_do_not_reach() -> None:
    """Unless that number of blocks was asked for: then the kernels say what is wrong."""
    model = load_preset("llama-3-8b")[1]
    given: dict[str, Any] = {"weights": 0, "pool_heads": 8, "shards": 2, "device": ("gpu", 8 << 30)}
    room = pool_room(demand(rows=8), model, "int8", platform="cuda", **given)
    assert room.gap == (1 << 31 - 18, 1 << 32 - 18)  # 32 layers of 4 heads of 16 slots of 128
    for dtype, platform in (("int8", "cpu"), ("bfloat16", "cuda")):
        assert pool_room(demand(rows=8), model, dtype, platform=platform, **given).gap == (0, 0)
    least, most = room.gap
    found = {array_blocks(demand(), Room(n, n, room.gap)) for n in range(least, 2 * most, 64)}
    assert min(found) == least and not any(least < one <= most for one in found)
    assert array_blocks(demand(least - 1), Room(64 * most, 64 * most, room.gap)) == least
    assert array_blocks(demand(least + 1), Room(most, most, room.gap)) > least


@given(st.integers(16, 1 << 30))
def test_there_are_few_sizes(start: int) -> None:
    """From some number of blocks to twice that, whatever memory there is."""
    every = range(start, 2 * start, max(1, start // 1000))
    tight = {array_blocks(demand(), Room(blocks, blocks)) for blocks in every}
    assert len(tight) <= 18
    roomy = {array_blocks(demand(blocks), Room(64 * start, 64 * start)) for blocks in every}
    assert len(roomy) <= 2


@given(st.integers(2, 10**7), st.integers(1, 1000), st.integers(1, 64))
def test_a_modest_pool_leaves_others_most_of_the_memory(free: int, full: int, rows: int) -> None:
    """Four full requests or a sixteenth, at most a quarter and one full request, if there is room;
    and no more than is of use."""
    wanted = Demand(0, 16, 0, 0.9, rows, 16 * full, 64, modest=True)
    room = Room(free, free)
    blocks = pool_blocks(wanted, room)
    longest = 2 * full
    assert blocks <= min(free, rows * longest)
    assert blocks <= max(free / 4, longest)
    assert blocks <= max(free / 16, 4 * longest)
    assert blocks >= min(free, rows * longest, max(free // 8, longest), 4 * longest)
    assert blocks >= min(free, rows * longest, free // 32)
    assert array_blocks(wanted, room) >= blocks * 15 / 16 - 1


def test_a_little_more_or_less_memory_changes_no_modest_pool() -> None:
    wanted = Demand(0, 16, 0, 0.9, 32, 8192, 512, modest=True)
    around = {array_blocks(wanted, Room(n, n)) for n in range(46_000, 60_000, 7)}
    assert around == {4 * 1024}
    octave = {array_blocks(wanted, Room(n, n)) for n in range(1 << 18, 1 << 19, 101)}
    assert len(octave) == 1


def test_a_start_with_less_memory_decides_for_those_after_it(
    tmp_path: Path, shapes: dict[str, Path]
) -> None:
    """So that memory that comes and goes does not have each start compile everything again."""
    config = Config().with_fields(
        model__path=str(shapes["llama"]),
        model__load_format="random",
        model__dtype="float32",
        scheduler__max_rows=256,
        scheduler__max_batch_tokens=256,
        scheduler__max_prefill_tokens=256,
    )

    def blocks(mib: int, **given: float) -> int:
        chosen = choose(config.with_fields(**given), ("this host", mib << 20))
        cache = StartCache(str(tmp_path), key_of(chosen))
        return cache.with_pool_as_before(chosen.memory).allocated_blocks

    assert [blocks(m) for m in (30, 31, 8, 12, 16)] == [512, 512, 128, 128, 128]
    assert blocks(30) == 512, "that much is worth it"
    (tmp_path / POOLS).write_text("[1, 2")
    assert blocks(8) == 128
    assert blocks(16) == 128
    assert blocks(12, cache__memory_gib=0.008) == 2048, "a size that is asked for is had"


class Stop(Exception):
    pass


def test_another_number_of_blocks_compiles_nothing(
    shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step, and the shape that it is compiled for, are the same: see `make_model_step`."""
    compiled = []

    def warmup(self: JaxExecutor, *_: object, all_steps: bool) -> None:
        compiled.append((self.pool.shape, self._steps))
        raise Stop

    monkeypatch.setattr(JaxExecutor, "warmup", warmup)
    config = Config().with_fields(model__path=str(shapes["opt"]), model__load_format="random")
    for blocks in (1000, 1024, 700):
        with pytest.raises(Stop):
            build_engine(config.with_fields(cache__num_blocks=blocks), progress=False)
    assert compiled[0] == compiled[1] == compiled[2]


def test_blocks_beyond_the_pool_are_never_used(shapes: dict[str, Path]) -> None:
    fields = {"cache__num_blocks": 36, "scheduler__max_rows": 8}
    with engine(shapes["opt"], **fields) as scarce:
        assert scarce.info().num_blocks == 36
        assert scarce.executor.pool.shape[1] == 64  # type: ignore[attr-defined]
        generate(scarce, prompts(8), **SAMPLING)
        beyond = scarce.executor.pool[:, 36:]  # type: ignore[attr-defined]
        assert not beyond.any()


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"cache__num_blocks": 8 * 32}, None),
        ({"cache__num_blocks": 8 * 32 - 2}, "projected"),
        ({"cache__memory_gib": 0.0001}, "projected"),
        ({}, None),
        ({"cache__hidden_read": "absorbed"}, "absorbed"),
        ({"cache__rho": "1e-7"}, "projected"),
    ],
)
def test_hidden_caches_are_for_pools_that_can_fill(
    fields: dict[str, Any], read: str | None, shapes: dict[str, Path]
) -> None:
    served = {"model__path": str(shapes["opt"]), "model__load_format": "random"}
    rows = {"cache__block_size": 4, "scheduler__max_rows": 8, "scheduler__policy": "aptserve"}
    chosen = choose(Config().with_fields(**served, **rows, **fields))
    assert chosen.kernels.model.hidden_read == read
    assert chosen.memory.buckets.hidden == (read is not None)


def test_room_for_a_weight_that_large_steps_write_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dataclasses.replace(platform_backend(), widened_rows=1024)
    monkeypatch.setattr(memory_choice, "platform_backend", lambda: backend)
    config = SimpleNamespace(quantization="int4", d_model=64, d_ff=256)
    model = SimpleNamespace(config=config, shards=2, activations=jnp.bfloat16)
    kernels: Any = SimpleNamespace(model=model)
    assert memory_choice._widened(kernels, 1023) == 0
    assert memory_choice._widened(kernels, 1024) == 64 * 128 * 2
    config.quantization = None
    assert memory_choice._widened(kernels, 1024) == 0
