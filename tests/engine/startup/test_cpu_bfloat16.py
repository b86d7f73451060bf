"""Weights of bfloat16 on a CPU: read as they are by every matmul, and chosen where that pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.config import Config
from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import make_buckets
from jaxserve.engine.device.model_step import make_model_step
from jaxserve.engine.device.sampling_state import Newest
from jaxserve.engine.device.step_model import StepModel, cached_in
from jaxserve.engine.startup.choices import model_options
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.startup.choices.model_options import has_instructions
from jaxserve.models.base import ParamSpec
from jaxserve.models.fused import fused_specs
from jaxserve.models.quantized import parse_quantization
from jaxserve.models.registry import family_for
from jaxserve.pallas_kernels import make_pool, pool_format
from jaxserve.pallas_kernels.cpu.amx import instructions
from jaxserve.pallas_kernels.cpu.pairs import has_pairs
from jaxserve_lab.compile_check.analysis import hlo
from tests.compiling import OPTIMISED
from tests.engine.harness import SAMPLING, SCARCE, SHAPES, engine, generate, prompts, write_shape

# Dimensions that nothing else in a step has, so that an array of theirs is a weight.
WIDE = {
    "opt": {"hidden_size": 384, "word_embed_proj_dim": 384, "ffn_dim": 1088, "vocab_size": 2112},
    "llama": {
        "hidden_size": 384,
        "intermediate_size": 1088,
        "vocab_size": 2112,
        "tie_word_embeddings": True,
    },
}
BUCKETS = make_buckets(8, 256, width=4, decode_group=8, decode_chunk=64)
LAYOUTS = {"one row": BUCKETS.decode(1), "chunks": BUCKETS.mixed(256)}
LIBRARY = "__ynn_fusion"
PANELS, DOTS = ("jaxserve_panels", "jaxserve_dots") if has_pairs() else (LIBRARY, LIBRARY)
if instructions.usable():
    DOTS = "jaxserve_amx"
needs_bfloat16 = pytest.mark.skipif(
    not has_instructions(), reason="this processor does not multiply bfloat16"
)


def compiled(family_name: str, layout: Layout) -> tuple[hlo.Module, Any]:
    """A step with weights of bfloat16, compiled, and the specs of its weights."""
    shape = SHAPES[family_name] | WIDE[family_name]
    family = family_for(shape)
    config = family.config_from_hf(shape)
    specs = fused_specs(family, config, 1)
    params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16), specs)
    pool = make_pool(config.num_layers, 16, config.num_kv_heads, 16, config.head_dim, jnp.float32)
    model = StepModel(family, config, "xla", None, None, 64, jnp.dtype(jnp.float32))
    step: Any = make_model_step(model, pool_format(pool))
    newest = Newest(*2 * [jax.ShapeDtypeStruct((layout.slots,), jnp.int32)])
    packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
    text = step.lower(params, pool, newest, packed, layout=layout).compile(OPTIMISED).as_text()
    return hlo.read(text), specs


@needs_bfloat16
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", pytest.param("opt", marks=pytest.mark.slow)])
def test_a_step_converts_no_weight_of_bfloat16(family: str, layout: str) -> None:
    module, specs = compiled(family, LAYOUTS[layout])
    weights = {spec.shape for spec in jax.tree.leaves(specs) if len(spec.shape) == 2}
    weights |= {shape[::-1] for shape in weights}
    made = [op for op in _operations(module) if op.arrays[:1] and op.arrays[0].dtype == "f32"]
    wide = [op for op in made if op.arrays[0].dims in weights]
    assert not wide, wide[0]
    # What multiplies weights [in, out] in a step, and the table, [out, in]; with chunks the table
    # has the last tokens of 8 rows only.
    entry = module.computations[module.entry]
    users = {kernel: [op for op in entry if kernel in op.rest] for kernel in (PANELS, DOTS)}
    assert all(users.values())
    names = {name for ops in users.values() for op in ops for name in op.operands}
    assert len(names & _weights(module)) == len(_multiplied(specs))


def _operations(module: hlo.Module) -> list[hlo.Operation]:
    """Those whose values are in memory: all that are in no fusion."""
    every = [op for lines in module.computations.values() for op in lines]
    fused = {name for op in every if op.opcode == "fusion" for name in op.called}
    return [op for name, lines in module.computations.items() if name not in fused for op in lines]


def _weights(module: hlo.Module) -> set[str]:
    """Of the entry parameters, those of two dimensions and 16 bits."""
    entry = [op for op in module.computations[module.entry] if op.opcode == "parameter"]
    return {op.name for op in entry if op.arrays[0].dtype == "bf16" and len(op.arrays[0].dims) == 2}


def _multiplied(specs: Any) -> list[ParamSpec]:
    """The weights that are factors of a matmul: all of two dimensions but OPT's positions."""
    return [s for s in jax.tree.leaves(specs) if len(s.shape) == 2 and s.axes[0] != "positions"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_int8\n", True),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("flags\t\t: fpu avx512f\nbugs\t: avx512_bf16\n", False),
        ("", False),
    ],
)
def test_the_instructions_are_found_in_what_linux_says(
    text: str, found: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert has_instructions(tmp_path / "cpuinfo") is found
    assert not has_instructions(tmp_path / "none")


@pytest.mark.parametrize(
    ("stored", "hidden", "there", "chosen"),
    [
        ("bfloat16", False, True, "bfloat16"),
        ("bfloat16", False, False, "float32"),
        ("bfloat16", True, True, "float32"),
        ("float16", False, True, "float32"),
        ("float32", False, True, "float32"),
        (None, False, True, "float32"),
    ],
)
def test_auto_takes_bfloat16_only_where_it_loses_nothing_and_has_instructions(
    stored: str | None, hidden: bool, there: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is timed: a busy machine would choose otherwise than an idle one."""
    monkeypatch.setattr(model_options, "has_instructions", lambda: there)
    hf = {"torch_dtype": stored}
    assert model_options.choose_dtype("auto", hf, hidden=hidden).name == chosen
    assert model_options.choose_dtype("float32", hf, hidden=hidden).name == "float32"


@pytest.mark.parametrize(
    ("how", "there", "chosen"),
    [
        ("int8", True, "bfloat16"),
        ("int4:group=32,zero", True, "bfloat16"),
        ("int4", False, "float32"),
        ("fp8", True, "float32"),  # CPUs have no kernel of it
    ],
)
def test_auto_rounds_what_few_bits_multiply_and_says_so(
    how: str,
    there: bool,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(model_options, "has_instructions", lambda: there)
    given = {"quantization": parse_quantization(how)}
    with caplog.at_level("INFO"):
        assert model_options.choose_dtype("float32", {}, **given).name == "float32"
        assert not caplog.records
        assert model_options.choose_dtype("auto", {}, **given).name == chosen
    assert ("model.dtype=float32" in caplog.text) is (chosen == "bfloat16")


def test_an_engine_of_bfloat16_weights_caches_hidden_rows_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "opt", SHAPES["opt"] | {"num_hidden_layers": 1})
    path = write_shape(tmp_path, "opt")
    fields = {"scheduler__policy": "aptserve", "model__dtype": "bfloat16", **SCARCE}
    given = {"model__path": str(path), "model__load_format": "random"}
    chosen = choose(Config().with_fields(**given, **fields)).kernels
    # Twice as wide, hidden caches would save nothing.
    assert (chosen.model.hidden_read, chosen.cache_dtype.name) == (None, "bfloat16")
    with engine(path, cache__hidden_read="absorbed", **fields) as served:
        assert served.info().dtype == "bfloat16"
        executor: Any = served.executor
        assert executor.pool.dtype == "float32"
        assert {leaf.dtype for leaf in jax.tree.leaves(executor.params)} == {jnp.dtype("bfloat16")}
        texts = generate(served, prompts(8), **SAMPLING)
        assert [len(text) for text in texts] == [SAMPLING["max_tokens"]] * 8


@pytest.mark.parametrize("memory", [0.001, 4.0])
def test_the_dtype_does_not_depend_on_how_much_memory_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: float
) -> None:
    monkeypatch.setattr(model_options, "has_instructions", lambda: True)
    monkeypatch.setitem(SHAPES, "opt", SHAPES["opt"] | {"torch_dtype": "bfloat16"})
    served = Config().with_fields(
        model__path=str(write_shape(tmp_path, "opt")),
        model__load_format="random",
        cache__memory_gib=memory,
    )
    assert choose(served).kernels.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("platform", "weights", "backend", "hidden", "cached"),
    [
        ("cpu", "bfloat16", "numba", False, "bfloat16"),
        ("cpu", "bfloat16", "numba", True, "float32"),
        ("cpu", "bfloat16", "xla", False, "float32"),
        ("cpu", "float16", "numba", False, "float32"),
        ("cpu", "float32", "numba", False, "float32"),
        ("gpu", "bfloat16", "triton", True, "bfloat16"),
    ],
)
def test_what_is_cached_in(
    platform: str, weights: str, backend: str, hidden: bool, cached: str
) -> None:
    assert cached_in(platform, jnp.dtype(weights), backend, hidden=hidden) == cached
