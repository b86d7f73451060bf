"""Caches cut off, copied, checkpointed and restored never change greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ConfigError, ServedModelConfig
from jaxserve.engine.device import cache_moves
from jaxserve.engine.device.cache_moves import ROOM
from jaxserve.engine.output import FinishReason
from jaxserve.engine.startup.choices import policy_choice
from jaxserve.engine.startup.choices.model_options import load_shape
from jaxserve.engine.startup.choices.pool_size import Demand, moving_workspace, pool_room
from jaxserve.sched.cache.block_pool import BlockPool
from tests.engine.conftest import Texts
from tests.engine.harness import (
    SAMPLING,
    SCARCE,
    engine,
    generate,
    prompts,
    send,
    wait_until_idle,
)
from tests.moving_caches import MovingCaches
from tests.sched.cache.invariants import check_host, check_pool

HOST = {"cache__host_gib": 0.001}
ROOMY = {**HOST, "engine__row_buckets": (32,)}  # one bucket: there is less to compile


@pytest.mark.promise(3)
@pytest.mark.parametrize(
    "fields",
    [{}, {"engine__overlap": False, "cache__hidden_read": "projected"}],
    ids=["overlap", "projected, no overlap"],
)
def test_text_survives_every_move(
    shapes: dict[str, Path],
    alone: Texts,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    expected = alone("opt")
    policy = MovingCaches()
    monkeypatch.setattr(cache_moves, "SIZES", (4, 16))  # most of what moves goes in several
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: policy)
    fields = {"cache__rho": "0", **fields}
    with engine(shapes["opt"], **ROOMY, **fields) as running:
        assert generate(running, prompts(), **SAMPLING) == expected
        host = running._scheduler.host
        assert host.num_used == 0
        check_host(host)
    for operation in ("checkpoint", "restore", "cut", "copy", "to_kv"):
        assert policy.did[operation] > 5, operation


def test_text_survives_being_swapped_out(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"scheduler__policy": "fastserve", "scheduler__params": {"quantum": 1.0}, **SCARCE}
    with engine(shapes["opt"], **HOST, **fields, engine__overlap=False) as running:
        load, loaded = running.executor.load, list[int]()
        monkeypatch.setattr(
            running.executor, "load", lambda keys, *more: (loaded.extend(keys), load(keys, *more))
        )
        assert generate(running, prompts(), **SAMPLING) == alone("opt")
        assert running._scheduler.host.num_used == 0
    assert len(loaded) > 5


def test_host_memory_is_for_policies_that_use_it(shapes: dict[str, Path]) -> None:
    with (
        pytest.raises(ConfigError, match=r"cache\.host_gib=1: the policy makes no checkpoints"),
        engine(shapes["opt"], cache__host_gib=1.0),
    ):
        pass
    with (
        pytest.raises(ConfigError, match=r"cache\.host_gib must be at least 0"),
        engine(shapes["opt"], cache__host_gib=-1.0),
    ):
        pass


def test_what_moves_has_room_beside_the_pool(shapes: dict[str, Path]) -> None:
    _, config, _ = load_shape(ServedModelConfig(path=str(shapes["opt"])))
    slot = config.num_layers * config.num_kv_heads * config.head_dim * 4
    heads = config.num_kv_heads
    assert moving_workspace(True, config, "float32", heads) == 2 * ROOM * slot
    assert moving_workspace(False, config, "float32", heads) == 0
    demand = Demand(0, 16, 0, 0.9, 4096, 4096, 64)
    sizes: dict[str, Any] = {
        "weights": 0,
        "pool_heads": heads,
        "shards": 1,
        "device": ("it", 1 << 30),
    }
    without = pool_room(demand, config, "float32", **sizes)
    fewer = pool_room(demand, config, "float32", other_work=160 * slot, **sizes)
    assert fewer.allowed == without.allowed - 10


def test_moves_that_fail_leave_nothing_behind(
    shapes: dict[str, Path], alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half booked or half carried out: what is on the host goes with those who had it there."""
    expected = alone("opt")
    monkeypatch.setattr(policy_choice, "make_policy", lambda name: MovingCaches(2))
    with engine(shapes["opt"], **ROOMY, cache__rho="0") as running:
        for owner, name, at in ((BlockPool, "grow_all", 20), (running.executor, "save", 9)):
            whole, calls = getattr(owner, name), list[int]()

            def failing(*args: Any, at: int = at, to: Any = whole, seen: Any = calls) -> Any:
                seen.append(1)
                if len(seen) == at:
                    raise MemoryError("no more of it")
                return to(*args)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, failing)
                streams = [send(running, prompt, **SAMPLING)[1] for prompt in prompts()]
                reasons = {stream.wait().reason for stream in streams}
            assert FinishReason.ERROR in reasons and len(calls) >= at
            wait_until_idle(running)
            host = running._scheduler.host
            assert host.num_used == 0 and running._scheduler.is_empty
            check_host(host)
            check_pool(running._scheduler.pool)
        assert running.stats().step_failures == 2
        assert generate(running, prompts(), **SAMPLING) == expected
        wait_until_idle(running)
        kept = set(running.executor._mover._host.keys)  # type: ignore[attr-defined]
        assert kept <= set(running._scheduler.host._dropped), "nobody forgets the others"
