"""The bytes that a compiled step moves, and its operations, by what its compiler prints."""

from __future__ import annotations

from jaxserve_lab.compile_check.analysis import hlo
from jaxserve_lab.compile_check.analysis.traffic import traffic
from tests.compile_check.test_findings import ROWS, SCANNED, STACK, UNROLLED

# One of two branches runs, and its rows go into a slice of a result that is updated in place.
CHOSEN = f"""\
HloModule jit__model_step, is_scheduled=true

%long (p.1: bf16[128,5120]) -> bf16[128,5120] {{
  %p.1 = {ROWS} parameter(0)
  %copy.1 = {ROWS} copy(%p.1)
  ROOT %copy.2 = {ROWS} copy(%copy.1)
}}

%short (p.2: bf16[128,5120]) -> bf16[128,5120] {{
  %p.2 = {ROWS} parameter(0)
  ROOT %copy.3 = {ROWS} copy(%p.2)
}}

%put (p.3: bf16[40,5120,5120], p.4: bf16[128,5120], p.5: s32[]) -> bf16[40,5120,5120] {{
  %p.3 = {STACK} parameter(0)
  %p.4 = {ROWS} parameter(1)
  %bitcast.4 = bf16[1,128,5120]{{2,1,0}} bitcast(%p.4)
  %p.5 = s32[] parameter(2)
  ROOT %update = {STACK} dynamic-update-slice(%p.3, %bitcast.4, %p.5, %p.5, %p.5)
}}

ENTRY %main.13 (x.1: bf16[128,5120], n.1: s32[], w.1: bf16[40,5120,5120]) -> bf16[40,5120,5120] {{
  %x.1 = {ROWS} parameter(0), metadata={{op_name="packed"}}
  %n.1 = s32[] parameter(1), metadata={{op_name="packed"}}
  %w.1 = {STACK} parameter(2), metadata={{op_name="scores"}}
  %chosen = {ROWS} conditional(%n.1, %x.1, %x.1), branch_computations={{%long, %short}}
  ROOT %out = {STACK} fusion(%w.1, %chosen, %n.1), kind=kLoop, calls=%put
}}
"""


def test_bytes_and_their_floor() -> None:
    def pool(op: hlo.Operation) -> bool:
        return op.source == "pool"

    rows, weight = 128 * 5120 * 2, 5120 * 5120 * 2
    found = traffic(hlo.read(UNROLLED), pool)
    # Of the embedding only the rows; of the pool nothing; the kernel reads the gemm's result.
    ids = 128 * 4
    assert found.floor == ids + rows + weight + rows
    assert found.moved == (ids + rows + rows) + (rows + weight + rows) + rows
    assert found.kernels == 3
    assert found.times_floor == found.moved / found.floor

    found = traffic(hlo.read(SCANNED), pool)
    # Each of 40 layers' weights is read, written and read again.
    assert found.floor == rows + 40 * weight + rows
    assert found.moved == 40 * (3 * weight + 2 * rows + 4)
    assert found.kernels == 80

    found = traffic(hlo.read(CHOSEN), pool)
    assert found.moved == 2 * (rows + rows) + (rows + 4 + rows)
    assert found.kernels == 3
