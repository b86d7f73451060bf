"""What cannot be served is said in one line, before anything is compiled; what can be is compiled
once."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import Config, ConfigError, SchedulerConfig
from jaxserve.engine.device.executor import JaxExecutor
from jaxserve.engine.startup import blueprint, build, compilation_cache
from jaxserve.engine.startup.choices import (
    device_memory,
    engine_choices,
    model_options,
    policy_choice,
)
from jaxserve.progress import Show
from jaxserve.sched.cost.profiles import System
from tests.cost_models import FLAT
from tests.engine.harness import SHAPES, engine, write_shape
from tests.models.fixtures import hf_config


def config_of(shape: Path, **fields: Any) -> Config:
    """Of a model with random weights."""
    given = {"model__path": str(shape), "model__load_format": "random", **fields}
    return Config().with_fields(engine__compilation_cache_dir="", **given)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.path": ""}, "model.preset is empty"),
        ({"model.path": "", "model.load_format": "auto"}, "model.path is empty"),
        ({"model.path": "/no/such/folder"}, "model.path: no such checkpoint .* /no/such/folder"),
        ({"model.load_format": "auto"}, "there is no .*tokenizer.json"),
        ({"model.load_format": "pickle"}, "model.load_format"),
        ({"model.path": "", "model.preset": "opt-999b"}, "opt-999b"),
        ({"model.dtype": "int8"}, "model.dtype must be auto or one of"),
        ({"scheduler.policy": "fcfs"}, "scheduler.policy: there is no policy 'fcfs'"),
        ({"scheduler.policy": "rank_o"}, "policy: rank_o knows how long outputs will get"),
        ({"scheduler.policy": "vllm+ef"}, r"scheduler.policy: vllm\+ef knows .* simulations only"),
        ({"scheduler.policy": "no/such.py:mine"}, "there is no policy file no/such.py"),
        (
            {"scheduler.policy": "vllm:watermark=x"},
            "scheduler.policy: policy 'vllm': watermark must be a number, got 'x'",
        ),
        (
            {"scheduler.policy": "sarathi", "scheduler.params": {"watermrk": "0"}},
            "scheduler.policy: policy .* has no parameter 'watermrk'; did you mean watermark",
        ),
        ({"scheduler.max_rows": 0}, "scheduler.max_rows must be at least 1"),
        (
            {"scheduler.max_rows": 65},
            r"scheduler.max_rows \(65\) must be at most scheduler.max_batch_tokens \(64\)",
        ),
        ({"scheduler.max_prefill_tokens": 999}, "scheduler.max_prefill_tokens"),
        ({"scheduler.max_queue": -1}, "scheduler.max_queue must be at least 0, got -1"),
        (
            {"scheduler.max_queue": 10**12},
            r"scheduler.max_queue and scheduler.max_rows together must be at most \d+, as the \d+ "
            r"bytes kept of each request take 1 GiB then; got 1000000000000 \+ 32",
        ),
        ({"scheduler.seed": 2**31}, "scheduler.seed must be 0 to 2147483647"),
        ({"scheduler.profile": "/no/such.json"}, "scheduler.profile: /no/such.json: No such file"),
        (
            {"scheduler.policy": "vllm", "scheduler.max_batch_tokens": 32},
            r"scheduler.max_batch_tokens \(32\) must be at least the longest request \(64",
        ),
        ({"engine.max_model_len": 65}, "engine.max_model_len must be 2 to the model's 64"),
        (
            {"engine.attention_backend": "cuda"},
            r"engine.attention_backend: backend: must be auto or one of .*'xla'.*, got 'cuda'",
        ),
        (
            {"engine.attention_backend": "triton"},
            "engine.attention_backend: backend: triton needs a gpu, this is a cpu",
        ),
        ({"engine.record": "x", "engine.record_mib": 0}, "engine.record_mib must be at least 1"),
        ({"engine.token_buckets": (8,)}, r"engine\.token_buckets must reach"),
        ({"cache.block_size": -1}, "cache.block_size must be at least 0, got -1"),
        ({"cache.num_blocks": 1}, "cache.num_blocks must be at least 2"),
        ({"cache.memory_gib": float("nan")}, "cache.memory_gib must be"),
        ({"cache.memory_gib": 1e9}, "cache.memory_gib: .* asked for, but .* leave"),
        ({"engine.max_model_len": 1}, "engine.max_model_len must be 2 to"),
        ({"mesh.tensor": 0}, "mesh.tensor must be at least 1, got 0"),
        ({"cache.memory_fraction": 0.0}, "cache.memory_fraction"),
        (
            {"cache.num_blocks": 10**12},
            r"cache.num_blocks=1000000000000 needs .* GiB, .*at most \d+ blocks of 16 tokens fit",
        ),
        ({"cache.memory_gib": 1e-6}, "cache.memory_gib: 0.0 MiB hold no block pair"),
        ({"cache.memory_fraction": 1e-9}, "the model does not fit"),
        ({"mesh.tensor": 3}, "mesh.tensor=3"),
    ],
)
def test_config_errors(
    shapes: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    message: str,
) -> None:
    def compiling(*_: object) -> None:
        raise AssertionError("compiled before the config was checked")

    monkeypatch.setattr(JaxExecutor, "warmup", compiling)
    sizes = {"scheduler__max_batch_tokens": 64, "scheduler__max_prefill_tokens": 64}
    config = config_of(shapes["opt"], **sizes)
    with pytest.raises(ConfigError) as caught:
        named = {name.replace(".", "__"): value for name, value in fields.items()}
        build.build_engine(config.with_fields(**named), progress=False)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "terminal", "how"),
    [("text", True, Show.BAR), ("text", False, Show.LINES), ("json", True, Show.LINES)],
)
def test_how_far_it_is_has_lines_where_no_bar_can_be_seen(
    shapes: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    terminal: bool,
    how: Show,
) -> None:
    asked: list[Show] = []

    def stop(*_: object, progress: Show, **more: object) -> None:
        asked.append(progress)
        raise ConfigError("far enough")

    monkeypatch.setattr(build, "build_programs", stop)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    config = config_of(shapes["opt"], telemetry__log_format=form)
    for progress, wanted in ((True, how), (False, Show.NOTHING)):
        with pytest.raises(ConfigError, match="far enough"):
            build.build_engine(config, progress=progress)
        assert asked.pop() is wanted


def _out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes\nmore")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), r"out of memory: lower cache.* \(MemoryError\)"),
        (_out_of_memory(), r"out of memory: lower cache.* \(RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_memory_that_is_not_there_after_all(
    shapes: dict[str, Path], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(blueprint, "make_pool", full)
    with pytest.raises(ConfigError, match=message) as caught:
        build.build_engine(config_of(shapes["opt"], cache__num_blocks=100), progress=False)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("Unknown backend cuda\nand more")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ConfigError) as caught:
        build.build_engine(Config(), progress=False)
    said = "JAX_PLATFORMS=cuda: there is no such device: Unknown backend cuda"
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("meminfo", "limit", "use", "free"),
    [
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", None, None, 5 * 1024),
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", "7168", "3072", 4 * 1024),
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", "max", "3072", 5 * 1024),
        ("MemTotal: 9 kB\nMemAvailable: 5 kB\n", "3072", "4096", 0),
        (None, "7168", "3072", 4 * 1024),
    ],
)
def test_the_pool_is_sized_by_the_memory_that_is_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meminfo: str | None,
    limit: str | None,
    use: str | None,
    free: int,
) -> None:
    files = {"meminfo": meminfo, "limit": limit, "use": use}
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    groups = ((tmp_path / "nowhere", tmp_path / "use"), (tmp_path / "limit", tmp_path / "use"))
    monkeypatch.setattr(device_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(device_memory, "_GROUPS", groups)
    assert device_memory.free_memory() == ("this host", free)


@pytest.mark.parametrize(
    ("measured", "policy", "hidden", "message"),
    [
        ({"layers": 3}, "sarathi", "auto", "it is of a model with 3 layers, this one has 2"),
        (
            {"experts": (8, 2)},
            "sarathi",
            "auto",
            "it is of a model with 8 experts, 2 a token, this one has 0, 0 a token",
        ),
        ({}, "aptserve_s", "auto", None),
        ({}, "aptserve_s", "absorbed", "it was measured without hidden caches; give cache.rho"),
        ({"rho": 0.0, "projects": True}, "aptserve_s", "auto", None),
        (
            {"rho": 0.0, "projects": True},
            "aptserve_s",
            "absorbed",
            "it was measured with hidden caches projected, here they are absorbed",
        ),
        ({"rho": 0.0, "projects": False}, "aptserve_s", "auto", None),
        ({}, "aptserve_s", "0", None),
        ({}, "sarathi", "auto", None),
    ],
)
def test_a_profile_is_of_such_an_engine(
    shapes: dict[str, Path],
    tmp_path: Path,
    measured: dict[str, Any],
    policy: str,
    hidden: str,
    message: str | None,
) -> None:
    """hidden: cache.hidden_read, or cache.rho."""
    path = tmp_path / "mine.json"
    measured = {"layers": 2, **measured}
    number, per_token = measured.pop("experts", (0, 0))
    model = dataclasses.replace(
        FLAT,
        num_layers=measured.pop("layers"),
        num_experts=number,
        experts_per_token=per_token,
    )
    System("mine", model, kv_tokens=100, **measured).save(path)
    config = config_of(
        shapes["opt"],
        cache__num_blocks=100,
        scheduler__policy=policy,
        scheduler__profile=str(path),
        **{"cache__hidden_read" if hidden == "absorbed" else "cache__rho": hidden},
    )
    if message is None:
        chosen = engine_choices.choose(config)
        assert chosen.profile is not None and chosen.profile.cost_model == model
        known = hidden == "0" or measured.get("projects") is True
        assert (chosen.kernels.model.hidden_read is not None) == (policy == "aptserve_s" and known)
        return
    with pytest.raises(ConfigError, match=f"scheduler.profile: {path}: {message}"):
        engine_choices.choose(config)


def test_what_windows_give_back_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = {"model_type": "gemma2", "sliding_window": 16, "head_dim": 8}
    monkeypatch.setitem(SHAPES, "gemma", SHAPES["llama"] | mixed)
    path = write_shape(tmp_path, "gemma")
    for longest, said in ((64, True), (16, False)):
        caplog.clear()
        fields = {"cache__num_blocks": 100, "engine__max_model_len": longest}
        with caplog.at_level(logging.INFO):
            engine_choices.choose(config_of(path, **fields))
        text = "1 of 2 layers have a window, and give .* back: a request of 64 tokens keeps 62%"
        assert bool(re.search(text, caplog.text)) == said


@pytest.mark.parametrize(
    ("policy", "retention", "warns"),
    [("continuum", "lru", True), ("continuum", "ttl", False), ("program_fcfs", "lru", False)],
)
def test_continuum_without_its_retention_warns(
    shapes: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
    policy: str,
    retention: str,
    warns: bool,
) -> None:
    fields = {"cache__num_blocks": 100, "cache__prefix_caching": True}
    fields |= {"scheduler__policy": policy, "cache__retention": retention}
    engine_choices.choose(config_of(shapes["opt"], **fields))
    said = [one.message for one in caplog.records if "retention" in one.message]
    text = "scheduler.policy=continuum keeps no caches while tools run: that takes "
    assert said == [text + "cache.retention=ttl"] * warns


def test_sampling_that_the_checkpoint_gives_may_be_left_out(tmp_path: Path) -> None:
    folder = write_shape(tmp_path, "llama")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": true}')
    config = config_of(folder)
    assert engine_choices.choose(config).sampling_defaults == {"temperature": 0.6}
    left_out = config.with_fields(model__generation_config="none")
    assert engine_choices.choose(left_out).sampling_defaults == {}
    with pytest.raises(ConfigError, match=r"model\.generation_config must be auto or none"):
        config.with_fields(model__generation_config="vllm")


def test_rotations_are_for_the_longest_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = hf_config("phi4_mini")
    monkeypatch.setitem(SHAPES, "phi", hf)
    path = write_shape(tmp_path, "phi")
    for longest, factors in ((32, "short_factor"), (64, "long_factor")):
        config = config_of(path, engine__max_model_len=longest)
        rope = engine_choices.choose(config).kernels.model.config.rope
        assert rope is not None and list(rope.factors) == hf["rope_scaling"][factors]


def test_the_policy_has_the_parameters_of_its_name_and_of_the_config() -> None:
    params = {"slo_decay": "0.4", "headroom": 0.2}
    config = SchedulerConfig(policy="aptserve:adaptive=false", params=params)
    policy: Any = policy_choice._policy(config)
    assert (policy.adaptive, policy.slo_decay, policy.headroom) == (False, 0.4, 0.2)


def test_cache_directory_is_used(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        compilation_cache.use(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        compilation_cache.use("")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("platform", "stored", "chosen"),
    [
        ("cpu", "float16", "float32"),
        ("gpu", "float16", "float16"),
        ("tpu", "float16", "bfloat16"),
        ("tpu", "float32", "float32"),
        ("tpu", None, "bfloat16"),
    ],
)
def test_auto_is_a_dtype_that_the_platform_computes_in(
    platform: str, stored: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert model_options.choose_dtype("auto", {"torch_dtype": stored}).name == chosen


def test_no_step_is_compiled_again_when_it_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "scheduler__max_rows": 3,  # nobody else's shapes, so that nobody has compiled them
        "scheduler__max_batch_tokens": 48,
        "scheduler__max_prefill_tokens": 48,
        "engine__row_buckets": (2, 3),
        "engine__token_buckets": (48,),
        "scheduler__policy": "goodput",
        "cache__hidden_read": "absorbed",
    }
    with jax.log_compiles(), engine(write_shape(tmp_path, "opt"), **fields):
        pass
    here = set(re.findall(r"Finished XLA compilation of jit\((\w+)\)", caplog.text))
    assert here, "the log has what this thread compiles"
    in_threads = {"_model_step", "sample_full", "_prompt_step", "_project_to_kv"}
    assert not here & in_threads, "threads have compiled them"
