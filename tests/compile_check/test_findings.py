"""What is wrong with a compiled step is seen in what its compiler prints. The texts are cut down
from those of OPT-13B's decode step: scanned and unrolled, with a pool of most of an A100."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve_lab.compile_check import toolchain
from jaxserve_lab.compile_check.analysis import findings, hlo
from jaxserve_lab.compile_check.analysis.findings import Findings, find_problems
from jaxserve_lab.compile_check.analysis.indices import narrow_in
from jaxserve_lab.compile_check.analysis.launches import outside_in
from jaxserve_lab.compile_check.analysis.weights import (
    Move,
    dequantized,
    is_parameter_of_model,
    moves,
)
from jaxserve_lab.compile_check.bundles import Loops, kernel_loops, loops_in
from jaxserve_lab.compile_check.case import CompileCase, Sizes, make_case
from jaxserve_lab.compile_check.compiling import COMPILED, Result
from jaxserve_lab.compile_check.programs import choose
from jaxserve_lab.compile_check.report import line
from jaxserve_lab.compile_check.targets import load_target

WEIGHT, ROWS = "bf16[5120,5120]{1,0}", "bf16[128,5120]{1,0}"
POOL = "bf16[40,512,40,16,128]{4,3,2,1,0}"
MIB = 1 << 20

UNROLLED = f"""\
HloModule jit__model_step, is_scheduled=true

%gemm_computation (parameter_0: bf16[128,5120], parameter_1: bf16[5120,5120]) -> bf16[128,5120] {{
  %parameter_0 = {ROWS} parameter(0)
  %parameter_1 = {WEIGHT} parameter(1)
  %convert.1 = f32[5120,5120]{{1,0}} convert(%parameter_1)
  %dot.1 = f32[128,5120]{{1,0}} dot(%parameter_0, %convert.1), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}
  ROOT %convert.2 = {ROWS} convert(%dot.1)
}}

%embed_computation (parameter_0.1: bf16[5120,5120], parameter_1.1: s32[128]) -> bf16[128,5120] {{
  %parameter_0.1 = {WEIGHT} parameter(0)
  %parameter_1.1 = s32[128]{{0}} parameter(1)
  ROOT %gather.1 = {ROWS} gather(%parameter_0.1, %parameter_1.1), offset_dims={{1}}
}}

ENTRY %main.13 (a.1: bf16[5120,5120], b.1: bf16[5120,5120], c.1: s32[128]) -> bf16[128,5120] {{
  %a.1 = {WEIGHT} parameter(0), metadata={{op_name="params.embed_tokens"}}
  %b.1 = {WEIGHT} parameter(1), metadata={{op_name="params.layers[0].o.kernel"}}
  %c.1 = s32[128]{{0}} parameter(2), metadata={{op_name="packed"}}
  %pool.1 = {POOL} parameter(3), metadata={{op_name="pool"}}
  %embed = {ROWS} fusion(%a.1, %c.1), kind=kLoop, calls=%embed_computation
  %gemm_fusion_dot.1 = {ROWS} fusion(%embed, %b.1), kind=kCustom, calls=%gemm_computation
  %pallas_call.1 = {POOL} custom-call(%gemm_fusion_dot.1, %pool.1), \
custom_call_target="__gpu$xla.gpu.triton"
  ROOT %tuple.81 = ({POOL}, {ROWS}) tuple(%pallas_call.1, %gemm_fusion_dot.1)
}}
"""

STACK = "bf16[40,5120,5120]{2,1,0}"
STATE = f"(s32[], {ROWS}, {STACK})"
SCANNED = f"""\
HloModule jit__model_step, is_scheduled=true

%slice_computation (p.0: bf16[40,5120,5120], p.1: s32[]) -> bf16[5120,5120] {{
  %p.0 = {STACK} parameter(0)
  %p.1 = s32[] parameter(1)
  %constant.0 = s32[] constant(0)
  %dynamic-slice.1 = bf16[1,5120,5120]{{2,1,0}} dynamic-slice(%p.0, %p.1, %constant.0, \
%constant.0), dynamic_slice_sizes={{1,5120,5120}}
  ROOT %bitcast.1 = {WEIGHT} bitcast(%dynamic-slice.1)
}}

%body (arg: (s32[], bf16[128,5120], bf16[40,5120,5120])) -> (s32[], bf16[128,5120], \
bf16[40,5120,5120]) {{
  %arg = {STATE} parameter(0)
  %n = s32[] get-tuple-element(%arg), index=0
  %x = {ROWS} get-tuple-element(%arg), index=1
  %stack = {STACK} get-tuple-element(%arg), index=2
  %loop_dynamic_slice_fusion = {WEIGHT} fusion(%stack, %n), kind=kLoop, calls=%slice_computation
  %custom-call.1 = {ROWS} custom-call(%x, %loop_dynamic_slice_fusion), \
custom_call_target="__cublas$gemm"
  ROOT %tuple.1 = {STATE} tuple(%n, %custom-call.1, %stack)
}}

%condition (arg.2: (s32[], bf16[128,5120], bf16[40,5120,5120])) -> pred[] {{
  %arg.2 = {STATE} parameter(0)
  ROOT %lt = pred[] constant(true)
}}

ENTRY %main.13 (x.1: bf16[128,5120], w.1: bf16[40,5120,5120]) -> bf16[128,5120] {{
  %x.1 = {ROWS} parameter(0), metadata={{op_name="packed"}}
  %w.1 = {STACK} parameter(1), metadata={{op_name="params.layers.o.kernel"}}
  %pool.1 = {POOL} parameter(2), metadata={{op_name="pool"}}
  %zero = s32[] constant(0)
  %tuple.2 = {STATE} tuple(%zero, %x.1, %w.1)
  %while.1 = {STATE} while(%tuple.2), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"40"}}}}
  ROOT %out = {ROWS} get-tuple-element(%while.1), index=1
}}
"""


def weights_moved(text: str) -> list[Move]:
    return moves(hlo.read(text), is_parameter_of_model)


def entry(*lines: str) -> str:
    """UNROLLED with more lines in its entry computation, before the last."""
    return UNROLLED.replace(
        "  ROOT %tuple.81", "".join(f"  {one}\n" for one in lines) + "  ROOT %tuple.81"
    )


@pytest.fixture
def case() -> CompileCase:
    """This process's CPU, passed off as a target."""
    target = dataclasses.replace(
        load_target("v6e"), platform="cpu", topologies={"host": 1}, options={}
    )
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
    return make_case("tiny", target, mesh, Sizes(16, 4, 32, "float32"), "xla")


def problems(case: CompileCase, text: str, folder: Path) -> list[str]:
    """Of a decode step with this optimised HLO."""
    nothing: Any = None
    return find_problems(case, choose("decode step")[0], nothing, text, folder).problems


def test_weights_that_are_only_read_are_not_moved(case: CompileCase, tmp_path: Path) -> None:
    assert weights_moved(UNROLLED) == []
    assert problems(case, UNROLLED, tmp_path) == []


def test_a_scan_moves_each_layers_weights(case: CompileCase, tmp_path: Path) -> None:
    """As on all GPUs before the layers were unrolled."""
    assert weights_moved(SCANNED) == [Move("%loop_dynamic_slice_fusion", "fusion", 2 * 5120 * 5120)]
    assert problems(case, SCANNED, tmp_path) == [
        "50 MiB of weights moved by 1 operations, such as fusion %loop_dynamic_slice_fusion"
    ]


@pytest.mark.parametrize(
    "moved",
    [
        f"%copy.1 = {WEIGHT} copy(%b.1)",
        "%transpose.1 = bf16[5120,5120]{0,1} transpose(%b.1), dimensions={1,0}",
        "%convert.9 = f32[5120,5120]{1,0} convert(%b.1)",
        "%slice.1 = bf16[2560,5120]{1,0} slice(%b.1), slice={[0:2560], [0:5120]}",
        "%concatenate.1 = bf16[5120,10240]{1,0} concatenate(%b.1, %a.1), dimensions={1}",
        f"%copy-start.1 = ({WEIGHT}, {WEIGHT}, u32[]) copy-start(%b.1)",
    ],
    ids=lambda text: text.split(" = ")[0],
)
def test_each_way_to_move_a_weight_is_seen(moved: str) -> None:
    found = weights_moved(entry(moved))
    assert [move.name for move in found] == [moved.split(" = ")[0]]
    (array, *_) = hlo.arrays(moved.split(" = ")[1])
    assert found[0].size == array.size


SMALL = "s8[5120,5120]{1,0}"
WIDENING = f"""\
HloModule jit__model_step, is_scheduled=true

%widen (p.0: s8[5120,5120], p.1: f32[1,5120]) -> bf16[5120,5120] {{
  %p.0 = {SMALL} parameter(0)
  %p.1 = f32[1,5120]{{1,0}} parameter(1)
  %convert.1 = f32[5120,5120]{{1,0}} convert(%p.0)
  %broadcast.1 = f32[5120,5120]{{1,0}} broadcast(%p.1), dimensions={{0,1}}
  %multiply.1 = f32[5120,5120]{{1,0}} multiply(%convert.1, %broadcast.1)
  END
}}

ENTRY %main.13 (a.1: bf16[128,5120], b.1: s8[5120,5120], c.1: f32[1,5120]) -> bf16[128,5120] {{
  %a.1 = {ROWS} parameter(0), metadata={{op_name="x"}}
  %b.1 = {SMALL} parameter(1), metadata={{op_name="params.layers[0].o.kernel.q"}}
  %c.1 = f32[1,5120]{{1,0}} parameter(2), metadata={{op_name="params.layers[0].o.kernel.scale"}}
  CALL
}}
"""


def test_a_weight_made_wide_in_memory_is_seen() -> None:
    wide = f"ROOT %convert.2 = {WEIGHT} convert(%multiply.1)"
    call = f"""%fusion.1 = {WEIGHT} fusion(%b.1, %c.1), kind=kLoop, calls=%widen
  ROOT %dot.1 = {ROWS} dot(%a.1, %fusion.1), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}"""
    module = hlo.read(WIDENING.replace("END", wide).replace("CALL", call))
    found = dequantized(module, is_parameter_of_model)
    assert found == [Move("%fusion.1", "fusion", 2 * 5120 * 5120)]
    assert not moves(module, lambda op: op.source.endswith(".scale"))


def test_a_weight_made_wide_within_a_product_is_let_be() -> None:
    product = f"""%convert.2 = {WEIGHT} convert(%multiply.1)
  ROOT %dot.1 = {ROWS} dot(%convert.2, %convert.2), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}"""
    call = f"ROOT %fusion.1 = {ROWS} fusion(%b.1, %c.1), kind=kCustom, calls=%widen"
    module = hlo.read(WIDENING.replace("END", product).replace("CALL", call))
    assert not dequantized(module, is_parameter_of_model)


def test_moving_what_was_moved_counts_again() -> None:
    twice = entry(
        f"%bitcast.7 = {WEIGHT} bitcast(%b.1)",
        f"%copy.1 = {WEIGHT} copy(%bitcast.7)",
        "%convert.9 = f32[5120,5120]{1,0} convert(%copy.1)",
    )
    assert [move.size // MIB for move in weights_moved(twice)] == [50, 100]


@pytest.mark.parametrize(
    "harmless",
    [
        f"%copy.1 = {ROWS} copy(%gemm_fusion_dot.1)",  # no weight
        "%slice.1 = bf16[100,5120]{1,0} slice(%b.1), slice={[0:100], [0:5120]}",  # small
        # Into a TPU's VMEM or CMEM, which is how it reads them.
        "%copy-start.1 = (bf16[5120,5120]{1,0:T(8,128)(2,1)S(1)}, bf16[5120,5120]{1,0:T(8,128)"
        "(2,1)}, u32[]{:S(2)}) copy-start(%b.1)",
        "%slice-start = ((bf16[5120,5120]{1,0}), bf16[2560,5120]{1,0:S(3)}, s32[]{:S(2)}) "
        "slice-start(%b.1), slice={[0:2560], [0:5120]}",
    ],
    ids=lambda text: text.split(" = ")[0],
)
def test_what_moves_no_weight_in_memory_is_let_be(harmless: str) -> None:
    assert weights_moved(entry(harmless)) == []


def test_what_is_computed_twice_is_seen(case: CompileCase, tmp_path: Path) -> None:
    """As with every pool of most of a GPU, before that pass of XLA's was off."""
    again = f"%gemm_fusion_dot.1.remat3 = {ROWS} fusion(%embed, %b.1), calls=%gemm_computation"
    assert problems(case, entry(again), tmp_path) == [
        "1 operations computed again to save memory, such as %gemm_fusion_dot.1.remat3"
    ]


def test_what_tpus_move_in_hidden_steps_is_told_and_let_be(
    case: CompileCase, tmp_path: Path
) -> None:
    nothing: Any = None
    tpu = dataclasses.replace(case, target=load_target("v6e"))
    for name, bad in (("decode step", True), ("hidden decode step", False)):
        found = find_problems(tpu, choose(name)[0], nothing, SCANNED, tmp_path)
        assert found.weights_moved == 2 * 5120 * 5120
        assert bool(found.problems) == bad


def test_names_that_are_not_there_are_a_failure(case: CompileCase, tmp_path: Path) -> None:
    """Lest every step pass because its weights are called something else."""
    for name, said in (("params", "none of the step's parameters is called params"),
                       ("pool", "arg is as large as weights, but neither")):  # fmt: skip
        with pytest.raises(RuntimeError, match=said):
            problems(case, UNROLLED.replace(f'op_name="{name}', 'op_name="arg'), tmp_path)


def test_a_step_in_one_command_buffer() -> None:
    whole = """\
000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=018 (17)] kCopy
    002: kCustomKernel [source       | sink         ] gemm_1 grid: [1, 1, 1] threads: [128, 1, 1]
"""
    assert outside_in(whole) == []
    alone = (
        "003: kCustomKernel [prev=002 (1) | sink  ] gemm_2 grid: [1, 1, 1] threads: [64, 1, 1]\n"
    )
    assert outside_in(whole + alone + whole) == ["gemm_2"]
    assert outside_in(alone) == ["gemm_2"]


def test_what_only_gpus_get_wrong(
    case: CompileCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel launched by itself counts on one GPU: on several, collectives stand between."""
    narrow: list[str] = []
    monkeypatch.setattr(findings, "_kernels", lambda case, folder: [])
    monkeypatch.setattr(findings, "narrow_indices", lambda lowered: narrow)
    path = tmp_path / "module_0001.thunk_sequence_after_thunk_passes.txt"
    path.write_text("001: kCustomKernel [source | sink] gemm_2 grid: [1, 1, 1] threads: [64, 1, 1]")
    gpu = dataclasses.replace(case, target=load_target("a100"))
    said = ["1 kernels outside of command buffers, such as gemm_2"]
    assert problems(gpu, UNROLLED, tmp_path) == said
    two = Mesh(np.asarray(jax.devices()[:1] * 2), ("tensor",))
    assert problems(dataclasses.replace(gpu, mesh=two), UNROLLED, tmp_path) == []
    narrow.append("write: operand 11")
    assert problems(gpu, UNROLLED, tmp_path) == [*said, "32-bit indices: write: operand 11"]


def test_indices_of_large_arrays() -> None:
    text = """\
    %5 = tt.splat %arg11 : !tt.ptr<bf16> -> tensor<64x128x!tt.ptr<bf16>>
    %6 = tt.addptr %5, %4 : tensor<64x128x!tt.ptr<bf16>>, tensor<64x128xi64>
    %7 = tt.addptr %arg6, %3 : !tt.ptr<i32>, i32
    %8 = tt.splat %arg11 : !tt.ptr<bf16> -> tensor<64x!tt.ptr<bf16>>
    %9 = tt.addptr %8, %4 : tensor<64x!tt.ptr<bf16>>, tensor<64xi32>
"""
    assert narrow_in(text, {11}) == [11]
    assert narrow_in(text, {10}) == []
    assert narrow_in(text.replace("64xi32", "64xi64"), {11}) == []
    assert narrow_in(text, {6, 11}) == [6, 11]


def test_no_registers_are_a_failure(
    case: CompileCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "ptxas", lambda: tmp_path / "ptxas")
    with pytest.raises(RuntimeError, match="the assembler got no kernel"):
        findings._kernels(case, tmp_path)


LISTING = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1   :  { %s2 = smov 0 }
   0x2 LB: > { %s3 = sld [smem:[#allocation1]] }
   0x3   :  {} /* End region 22 */
   0x4 LB: >> { %s4 = smov 0 }
   0x5   : >> { %s5 = smov 0 } /* Start region 27 */
   0x6 PF: > { %s6 = smov 0 }
   0x7   : > { %s7 = smov 0 }
   0x8   :  { %s8 = smov 0 }
   0x9 LB: > { %s9 = smov 0 }
   0xa   :  { %s9 = sfence }
"""


def test_cycles_of_loops(tmp_path: Path) -> None:
    want = Loops("paged_decode", 11, (4, 2, 1))
    assert loops_in("paged_decode", LISTING) == want
    for name in ("paged_decode.1-01", "paged_decode.2-01", "fusion.3-01"):
        (tmp_path / f"1795-{name}-final_bundles.txt").write_text(LISTING)
    (tmp_path / "1795-paged_decode.1-00-schedule-analysis_final_bundles.txt").write_text("")
    assert kernel_loops(tmp_path, {"paged_decode"}) == [want]


@pytest.mark.parametrize("begin", ["all-gather(", "all-gather-start("])
def test_gathering_all_contexts_is_seen(case: CompileCase, tmp_path: Path, begin: str) -> None:
    """As for hidden rows over a mesh before they took turns: 5 GiB for OPT-13B on two A100s."""
    width, most = case.config.d_model, case.config.max_position
    part = f"f32[{most},{width // 2}]{{1,0}}"

    def gathered(rows: int) -> list[str]:
        whole = f"f32[{rows * most},{width}]{{1,0}}"
        shape = whole if begin == "all-gather(" else f"({part}, {whole})"
        operation = f"%gather.2 = {shape} {begin}%x.1), dimensions={{1}}"
        return problems(case, entry(operation), tmp_path)

    assert gathered(1) == []
    mib = case.sizes.max_rows * most * width * 4 >> 20
    assert gathered(case.sizes.max_rows) == [f"%gather.2 gathers {mib} MiB of all devices at once"]


def test_a_problem_is_bad_and_printed() -> None:
    found = Findings(loops=[Loops("write", 20, (3, 5))], problems=["it is wrong"])
    memory = dict.fromkeys(("arguments", "outputs", "aliased", "temporaries", "code"), 0)
    result = Result("v5e", "tiny", 1, "write", COMPILED, memory=memory, findings=found)
    assert result.is_bad and re.search(r"write 3\+5 cycles  BAD: it is wrong$", line(result))
    assert result.as_json()["problems"] == ["it is wrong"]
    assert result.as_json()["loops"][0]["cycles"] == (3, 5)
