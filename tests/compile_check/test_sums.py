"""What a compiled step adds up is listed, and what may do so in varying order is named. The texts
are cut down from those of an A100 and of a TPU v5e."""

from __future__ import annotations

from pathlib import Path

from jaxserve_lab.compile_check.analysis import hlo
from jaxserve_lab.compile_check.analysis.sums import float_atomics, sums_of, unordered
from jaxserve_lab.compile_check.programs import choose

REDUCED = "dimensions={1}, to_apply="
STEP = f"""\
HloModule jit__model_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%max (a.1: f32[], b.1: f32[]) -> f32[] {{
  %a.1 = f32[] parameter(0)
  %b.1 = f32[] parameter(1)
  ROOT %most = f32[] maximum(%a.1, %b.1)
}}

ENTRY %main (x: bf16[32,768], w: bf16[768,256], y: f32[32,512], z: f32[4,32,8]) -> f32[32] {{
  %x = bf16[32,768]{{1,0}} parameter(0)
  %w = bf16[768,256]{{1,0}} parameter(1)
  %y = f32[32,512]{{1,0}} parameter(2)
  %z = f32[4,32,8]{{2,1,0}} parameter(3)
  %zero = f32[] constant(0)
  %dot.1 = f32[32,256]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %matmul.1 = (bf16[32,256]{{1,0}}, s8[64]{{0}}) custom-call(%x, %w), \
custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":\
{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"]}}}}}}
  %convolution.1 = f32[32,256]{{1,0}} convolution(%x, %w), dim_labels=bf_io->bf
  %reduce.1 = f32[32]{{0}} reduce(%y, %zero), {REDUCED}%add
  %reduce.2 = f32[32]{{0}} reduce(%y, %zero), {REDUCED}%max
  %reduce.3 = f32[32]{{0}} reduce(%z, %zero), dimensions={{0,2}}, to_apply=%add
  %pallas_call.1 = bf16[32,64]{{1,0}} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={{op_name="jit(_model_step)/paged_uncut/pallas_call"}}
  %paged_prefill.7 = bf16[32,64]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call"
  ROOT %out = f32[32]{{0}} add(%reduce.1, %reduce.3)
}}
"""
FOUND = {
    "bf16 dot 768": 3,
    "f32 reduce 4x8": 1,
    "f32 reduce 512": 1,
    "kernel paged_prefill": 1,
    "kernel paged_uncut": 1,
}


def test_sums_are_listed_by_what_is_added_up() -> None:
    """A product by a loop, a library or a matrix unit is one; to find the largest is none."""
    assert sums_of(hlo.read(STEP)) == FOUND
    assert list(unordered(FOUND, [])) == []


def test_what_adds_up_in_varying_order_is_named(tmp_path: Path) -> None:
    split = STEP.replace("/paged_uncut/", "/merge_parts/").replace(
        "reduce(%z, %zero), dimensions={0,2}", "scatter(%z, %w, %x), update_window_dims={1}"
    )
    source = (
        "red.global.add.f32 \t[%rd4], %f1;\n@%p1 atom.global.add.noftz.bf16x2 %r1, [%rd5], %r2;"
    )
    (tmp_path / "kernel.ptx").write_text(f"atom.global.add.u32 %r3, [%rd1], 1;\n{source}\n")
    atomics = float_atomics(tmp_path)
    assert atomics == ["red.global.add.f32", "atom.global.add.noftz.bf16x2"]
    found = list(unordered(sums_of(hlo.read(split)), atomics))
    assert [line.split(" adds up")[0] for line in found] == [
        "a scatter",
        "kernel merge_parts",
        "atom.global.add.noftz.bf16x2",
        "red.global.add.f32",
    ]


def test_one_program_is_held_to_it() -> None:
    assert [one.name for one in choose("all") if one.deterministic] == ["deterministic step"]
