"""What needs no compiler of a GPU or TPU: targets, command line, accounting, what is missing."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxserve
from jaxserve.engine.startup.choices.model_options import choose_read
from jaxserve.engine.startup.choices.pool_size import choose_block_size
from jaxserve.models.lora import LoraSlots
from jaxserve.models.presets import preset_names
from jaxserve.models.quantized import BLOCKS
from jaxserve.pallas_kernels.rowwise.fixed_batches import SIZE
from jaxserve.sched.cost.model_shapes import Model
from jaxserve.sched.registry import make_policy
from jaxserve.simulator.systems.systems import hidden_read_of
from jaxserve_lab.compile_check import cli, programs, report, toolchain
from jaxserve_lab.compile_check.analysis.findings import host_copies
from jaxserve_lab.compile_check.analysis.launches import shared_in, shared_memory
from jaxserve_lab.compile_check.analysis.ptx import parse
from jaxserve_lab.compile_check.case import (
    CompileCase,
    Sizes,
    make_case,
    model_shape,
    quantized_model,
)
from jaxserve_lab.compile_check.check import AUTO, Checked, Wish, check_model
from jaxserve_lab.compile_check.compiling import (
    COMPILED,
    FAILED,
    NO_ROOM,
    NOT_CHECKED,
    Result,
    compile_program,
)
from jaxserve_lab.compile_check.programs import PROGRAMS, Program, choose
from jaxserve_lab.compile_check.targets import Target, load_target, target_names

BOX = Path("assets", "tiny-stories")
SIZES = Sizes(block_size=16, max_rows=4, max_batch_tokens=32, dtype="float32")
NAMES = ["a100", "h100", "h200", "v4", "v5e", "v5p", "v6e", "v7x"]
KINDS = ("arguments", "outputs", "aliased", "temporaries", "code")
COPY = Result("v6e", "tiny", 1, "move", COMPILED, memory=dict.fromkeys(KINDS, 0))


def host(memory: int = 1 << 30) -> Target:
    """This process's CPU, passed off as a target."""
    return dataclasses.replace(
        load_target("v6e"), platform="cpu", memory_bytes=memory, topologies={"host": 1}, options={}
    )


def host_case(target: Target, model: str = "tiny") -> CompileCase:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
    return make_case(model, target, mesh, SIZES, "xla")


def test_every_claimed_target_is_there() -> None:
    assert target_names() == NAMES
    for name in NAMES:
        target = load_target(name)
        assert target.memory_bytes > 15 << 30
        assert target.topologies[target.topology(2)] >= 2
        assert (target.platform == "cuda") == bool(target.gpu)


def test_a_gpu_is_described_in_full() -> None:
    target = load_target("a100")
    text = target.gpu_config
    assert "cuda_compute_capability { major: 8 minor: 0 }" in text
    assert "core_count: 108" in text
    assert text.count("{") == text.count("}")
    said = re.findall(r"device_memory_size: (\d+)", text)
    # XLA takes 80% of it.
    assert [int(size) * 4 // 5 for size in said] == [target.memory_bytes]


def test_weights_as_in_a_gguf_file() -> None:
    """Of GPUs and TPUs, which have no kernel for a table in groups."""
    _, config = quantized_model("llama-3-8b", "q4_1")
    assert config.quantization is not None and config.quantization.wide == ("lm_head",)
    assert config.quantization.scheme == BLOCKS["Q4_1"] == config.quantization.table


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--target=a100,k80", "'k80' is not one of"),
        ("--model=opt-14b", "'opt-14b' is not known"),
        ("--programs=decode", "'decode' is not one of all, steps, kernels, decode step"),
        ("--tensor=-1", "--tensor must be at least 1 (0: as needed), got -1"),
        ("--target=v5e:four", "--tensor must be at least 1 (0: as needed), got four"),
        ("--target=v5e:9", "v5e: at most 8 devices, got 9"),
        ("--tensor=16", "at most 8 devices, got 16"),
        ("--block_size=-1", "--block_size must be at least 0, got -1"),
        ("--max_rows=0", "--max_rows must be at least 1, got 0"),
        ("--quantization=int3", "must be int8, int4 or fp8"),
        ("--quantization=q5_0", "must be int8, int4 or fp8"),
        ("--lora=8", "--lora must be slots (1 to 256):rank (8, 16, 32, 64, 128, 256), got 8"),
        ("--lora=0:16", "--lora must be slots"),
        ("--lora=8:12", "--lora must be slots"),
        ("--backend=cuda", "backend: must be auto or one of"),
        ("--write_doc=/no/such/page.md", "--write_doc: there is no folder /no/such"),
    ],
)
def test_a_wrong_flag_is_explained(
    flag: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.parse([flag])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_blocks_are_those_of_the_engine_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four tokens on a TPU, unless told otherwise; the page says so."""
    wish = cli.parse(["--dtype=float32", "--max_rows=4", "--max_batch_tokens=32"])[1][0].wish
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
    tpu = make_case("tiny", load_target("v6e"), mesh, wish.sizes, "xla")
    assert tpu.sizes.block_size == 64
    assert tpu.blocks == 4 * 2 * 512 // 64, "of four requests of full length"
    assert host_case(host()).sizes.block_size == SIZES.block_size
    assert make_case("tiny", host(), mesh, wish.sizes, "xla").sizes.block_size == 16
    said = report.page([Checked("tiny", host(), None, [])], wish.sizes, [])
    sizes = "4 requests, 32 tokens, float32, blocks of 64 (TPUs) or 16 (GPUs) tokens; python 3"
    assert f"\n{sizes}" in said
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert [choose_block_size(wanted) for wanted in (0, 8)] == [64, 8]


def test_a_folder_with_a_config_is_a_model(tmp_path: Path) -> None:
    _, tiny = model_shape("tiny")
    hf = json.loads((Path(jaxserve.__file__).parent / BOX / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**hf, "num_hidden_layers": 2}))
    assert model_shape(str(tmp_path))[1] == dataclasses.replace(tiny, num_layers=2)
    for text in ("{", "[]", "{}", '{"model_type": "opt"}'):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"--model: {re.escape(str(tmp_path))}: "):
            model_shape(str(tmp_path))


def test_everything_is_checked_by_default() -> None:
    _, asked = cli.parse([])
    assert [one.model for one in asked] == list(cli.MODELS)
    first, *_, last = asked
    assert [target.name for target, _ in first.targets] == [*NAMES, "a100", "v5e"]
    assert [count for _, count in first.targets] == [AUTO] * len(NAMES) + [2, 4]
    assert first.wish.programs == list(PROGRAMS)
    assert [(target.name, count) for target, count in last.targets] == [
        ("a100", 2), ("h200", AUTO), ("v5p", AUTO), ("v6e", AUTO),
    ]  # fmt: skip
    assert last.wish.programs == choose("steps")
    assert {p.whole for p in choose("steps")} == {True}
    assert len(choose("kernels,write")) == len(PROGRAMS) - len(choose("steps"))


def test_what_is_said_of_one_model_holds_for_any() -> None:
    _, asked = cli.parse(["--model=tiny,mixtral-8x7b", "--target=v5e:4", "--programs=write"])
    for one in asked:
        assert [(target.name, count) for target, count in one.targets] == [("v5e", 4)]
        assert one.wish.programs == choose("write")
    (other,) = cli.parse(["--model=tiny"])[1]
    assert len(other.targets) == len(NAMES) + 2 and other.wish.programs == list(PROGRAMS)


def test_a_missing_compiler_is_not_a_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        toolchain, "quiet_start", lambda loops: None
    )  # it changes the whole process
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert cli.main(["--target=h100,v5p", "--model=tiny", "--json"]) == 3
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["targets"]
    assert [one["programs"][0]["status"] for one in found] == [NOT_CHECKED, NOT_CHECKED]
    assert found[0]["verdict"] == "not checked: jax-cuda13-pjrt is not installed"
    assert found[1]["verdict"] == "not checked: libtpu is not installed"


def test_exit_codes() -> None:
    def result(status: str, fits: bool | None = None) -> Result:
        return Result("a100", "tiny", 1, "write", status, fits=fits)

    assert cli.exit_code([result(COMPILED), result(COMPILED, True)]) == 0
    assert cli.exit_code([result(COMPILED), result(NOT_CHECKED)]) == 3
    assert cli.exit_code([result(FAILED), result(NOT_CHECKED)]) == 1
    assert cli.exit_code([result(NO_ROOM, False)]) == 1
    assert cli.exit_code([result(COMPILED, False)]) == 1


def test_a_step_of_hidden_rows_only_makes_no_keys_and_values_of_its_tokens() -> None:
    case = host_case(host())
    rows, width = SIZES.max_rows, case.config.d_model

    def projections(hidden: int) -> int:
        """Of this step's tokens, by matrices as large as q's, k's, v's and o's, of all rows at once
        or in batches, as on processors without AVX-512."""
        text = programs._step(case, case.buckets.decode(rows, hidden=hidden)).as_text()
        weight = f"tensor<{width}x{width}xf32>"
        return sum(text.count(f"(tensor<{n}x{width}xf32>, {weight})") for n in {rows, SIZE})

    with_kv = projections(rows - 1)  # those of layers that share a function count once
    assert with_kv in (4, 4 * case.config.num_layers)
    assert projections(rows) == with_kv // 2


def test_a_step_that_needs_more_than_there_is_does_not_fit() -> None:
    case = host_case(host())
    small = dataclasses.replace(case, target=host(memory=case.pool_bytes))
    result = compile_program(small, choose("decode step")[0])
    assert result.fits is False and result.is_bad


def test_what_does_not_compile_is_a_failure() -> None:
    def broken(case: CompileCase) -> jax.stages.Lowered:
        raise NotImplementedError("no such instruction\nand more")

    result = compile_program(host_case(host()), Program("broken", broken))
    assert result.status == FAILED
    assert result.reason == "NotImplementedError: no such instruction"
    assert "FAILED" in report.line(result)


def test_a_model_that_no_group_holds_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "why_not", lambda target: None)
    monkeypatch.setattr(
        toolchain, "mesh", lambda target, n: Mesh(np.asarray(jax.devices()[:n]), ("tensor",))
    )
    told: list[Result] = []
    wish = Wish(choose("steps"), SIZES, "xla")
    found = check_model("opt-13b", host(), AUTO, wish, told.append)
    assert [result.status for result in found.results] == [NO_ROOM]
    assert told == found.results
    assert "1: the model does not fit: weights 47.88 GiB" in found.too_small[0]


def test_hidden_programs_are_for_models_that_can_have_them() -> None:
    names = {program.name for program in PROGRAMS if program.hidden}
    assert {"absorbed", "projected decode", "projected prefill"} <= names
    multi = host_case(host())
    grouped = dataclasses.replace(multi, config=model_shape("llama-3-8b")[1])
    absorbed = choose("absorbed")[0]
    assert absorbed.applies(multi) and not absorbed.applies(grouped)


def test_a_step_with_adapters_needs_room_for_them() -> None:
    step = choose("decode step with adapters")[0]
    plain = host_case(host())
    assert not step.applies(plain)
    sizes = dataclasses.replace(SIZES, lora=LoraSlots(3, 8))
    case = make_case("tiny", host(), plain.mesh, sizes, "xla")
    assert step.applies(case)
    config, columns = case.config, 3 * 8
    width, inner = config.d_model, config.d_ff
    # q, k and v, o, and both of the feed-forward layer.
    numbers = columns * (6 * width + 2 * width + 2 * (width + inner))
    assert case.weights_bytes - plain.weights_bytes == 4 * (config.num_layers * numbers + columns)
    result = compile_program(case, step)
    assert (result.status, result.fits) == (COMPILED, True)
    without = compile_program(plain, choose("decode step")[0])
    whole = plain.weights_bytes + plain.pool_bytes
    assert whole < without.memory["arguments"] < whole + (1 << 20)
    assert without.memory["aliased"] == plain.pool_bytes, "the pool is not updated in place"
    assert whole < without.needed < whole + (64 << 20)
    more = result.memory["arguments"] - without.memory["arguments"]
    assert 0 <= more - 4 * config.num_layers * numbers <= 4096, "numbers of adapters by row"


def test_copies_to_host_memory_are_read_from_the_compiled_program() -> None:
    to = "(bf16[2,4]{1,0:S(5)}, bf16[2,4]{1,0:T(2,128)}, u32[]{:S(2)}) copy-start(%staged), x={}"
    back = "(bf16[2,4]{1,0}, bf16[2,4]{1,0:S(5)}, u32[]) copy-start(%kept)"
    done = "  ROOT %done = bf16[2,4]{1,0:S(5)} copy-done(%a)\n  %e = bf16[2,4]{1,0} copy-done(%b.1)"
    assert host_copies(f"  %a = {to}\n  %b.1 = {back}\n{done}") == (1, 1)
    assert host_copies(f"  %a = {to}\n{done}") == (1, 0)
    assert host_copies(f"  %c = {to}\n  %d = {back}\n{done}") == (0, 0), "never waited for"
    onto = "  %a = (f32[2]{0}, f32[2]{0}, u32[]) copy-start(%x)\n"
    assert host_copies(onto + "  %y = f32[2]{0} copy-done(%a)") == (0, 0), "within the device"


def test_what_does_not_go_through_host_memory_is_a_failure() -> None:
    """As on a CPU, all of whose memory is that."""
    result = compile_program(host_case(host()), choose("to the host and back")[0])
    assert result.status == FAILED
    assert result.reason == "RuntimeError: asynchronous copies: 0 to host memory, 0 from there"


def test_registers_are_read_from_the_assembler() -> None:
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend' for 'sm_80'
ptxas info    : Function properties for attend
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 376 bytes cmem[0]
ptxas info    : Compiling entry function 'copy' for 'sm_80'
ptxas info    : Function properties for copy
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, 376 bytes cmem[0]
"""
    uses = parse(log)
    assert [(u.name, u.registers, u.spill_stores, u.spill_loads) for u in uses] == [
        ("attend", 255, 12, 16),
        ("copy", 16, 0, 0),
    ]
    assert report.registers(uses) == "255 registers, 0 KiB shared, spills attend 12/16 B"


def test_shared_memory_is_read_from_the_launches() -> None:
    thunks = """\
001: kCustomKernel [source       | next=002 (1)] attend grid: [4, 1, 1] threads: [128, 1, 1]  \
shared_memory: 10240 bytes
002: kKernel [prev=001 (1) | sink        ] fused_add grid: [1, 1, 1] threads: [64, 1, 1]  \
shared_memory: 0 bytes
"""
    assert shared_in(thunks) == {"attend": 10240, "fused_add": 0}


def test_mosaics_own_dump_says_what_shared_memory_its_kernels_want(tmp_path: Path) -> None:
    said = "Resources(smem_scratch_bytes=206848, tmem_scratch_cols=0)\n"
    (tmp_path / "paged_decode_0.resources.txt").write_text(said)
    (tmp_path / "other_1.resources.txt").write_text("nothing known")
    assert shared_memory(tmp_path) == {"paged_decode_mosaic_gpu_kernel": 206848}


def test_the_page_says_what_was_compiled_and_what_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        toolchain, "why_not", lambda target: "nothing here" if target.name == "v4" else None
    )
    monkeypatch.setattr(
        toolchain, "mesh", lambda target, n: Mesh(np.asarray(jax.devices()[:n]), ("tensor",))
    )
    wish = Wish(choose("write,decode step"), SIZES, "xla")
    checked = [check_model("tiny", t, 1, wish, lambda r: None) for t in (host(), load_target("v4"))]
    # The command names the Python that compiled, where it is not the one of the environment.
    pages = []
    for version in ((3, 12, 1), (3, 11, 7)):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "version_info", version)
            pages.append(report.page(checked, wish.sizes, ["--tensor=1"]))
    newer, page = pages
    assert 'make compile-check PYTHON=python3.12 ARGS="--tensor=1"' in newer
    assert 'make compile-check ARGS="--tensor=1"' in page
    assert re.search(r"^\| v6e \| 1 \| .* \| [\d.]+ MiB of 1.00 GiB \| xla", page, re.MULTILINE)
    assert "not checked: nothing here" in page
    assert report.summary(checked)[1] == "v4, tiny: not checked: nothing here"
    step, write, other = csv.DictReader(report.programs(checked, wish.sizes).splitlines())
    assert (step["section"], step["target"], step["program"]) == ("tiny", "v6e", "decode step")
    assert float(step["bytes_over_floor"]) > 1 and float(step["weights_moved_gib"]) == 0
    assert float(step["kernels_a_layer"]) > 5 and step["fits"] == "yes"
    assert float(step["needed_gib"]) > 0 == float(step["code_gib"]) and write["fits"] == ""
    assert other["target"] == "v4" and other["on_chip"] == "not checked: nothing here"


def test_a_page_keeps_what_was_not_written_anew() -> None:
    """Each model's section says by which command it was written."""

    def written(model: str, before: str, *flags: str) -> str:
        sizes = cli.parse(flags)[1][0].wish.sizes
        return report.page([Checked(model, host(), None, [])], sizes, flags, before)

    def sections(page: str) -> dict[str, str]:
        return dict(part.split("\n", 1) for part in page.split("\n## ")[1:])

    both = written("opt-13b", written("tiny", ""), "--lora=8:16")
    assert list(sections(both)) == ["tiny", "opt-13b, 8 adapters of rank 16"]
    assert 'ARGS="--lora=8:16"' in sections(both)["opt-13b, 8 adapters of rank 16"]
    assert list(sections(written("tiny", "", "--cache_dtype=fp8"))) == ["tiny, caches of fp8"]
    again = written("tiny", both, "--tensor=2")
    assert 'ARGS="--tensor=2"' in sections(again)["tiny"]
    assert again.count('ARGS="') == 2 and written("tiny", again, "--tensor=2") == again
    assert again.endswith("|\n") and not again.endswith("\n\n")


def test_the_table_of_programs_keeps_what_was_not_compiled_anew() -> None:
    def written(model: str, before: str, seconds: float) -> str:
        result = dataclasses.replace(COPY, seconds=seconds)
        return report.programs([Checked(model, host(), None, [result])], SIZES, before)

    both = written("opt-13b", written("tiny", "", 1.0), 2.0)
    again = written("tiny", both, 3.0)
    assert [row[:4] for row in csv.reader(again.splitlines())][1:] == [
        ["tiny", "v6e", "move", "3.0"],
        ["opt-13b", "v6e", "move", "2.0"],
    ]


def test_a_page_is_written_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(model: str, target: Target, *_: object) -> Checked:
        return Checked(model, target, None, [dataclasses.replace(COPY, target=target.name)])

    monkeypatch.setattr(cli, "check_model", checked)
    monkeypatch.setattr(toolchain, "quiet_start", lambda loops: None)
    page = tmp_path / "some.md"
    for model in ("tiny", "opt-13b"):
        assert cli.main([f"--model={model}", "--target=v6e", f"--write_doc={page}"]) == 0
    assert page.read_text().count("\n## ") == 2
    rows = list(csv.DictReader((tmp_path / "figures" / "some.csv").read_text().splitlines()))
    assert [row["section"] for row in rows] == ["tiny", "opt-13b"]


def test_the_documented_table_has_every_target_and_model() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "targets.md").read_text()
    with (docs / "figures" / "targets.csv").open(newline="") as file:
        rows = [(r["section"], r["target"], r["program"]) for r in csv.DictReader(file)]
    for asked in cli.parse([])[1]:
        part = page.split(f"\n## {asked.model}\n")[1].split("\n## ")[0]
        programs = ["decode step", "prefill and mixed step"]
        if asked.wish.programs == list(PROGRAMS):
            programs += ["decode attention", "move"]
        for target, count in asked.targets:
            many = str(count) if count != AUTO else r"\d"
            assert re.search(rf"^\| {target.name} \| {many} \|", part, re.MULTILINE), target.name
            shared = "" if many == "1" else rf" x {many}" if count != AUTO else r"( x \d)?"
            found = [
                p for s, t, p in rows if s == asked.model and re.fullmatch(target.name + shared, t)
            ]
            assert set(programs) <= set(found), target.name
    for bad in ("FAILED", "not checked", "failed:", ",no,"):
        assert bad not in page and bad not in (docs / "figures" / "targets.csv").read_text()


@pytest.mark.parametrize("name", ["tiny", *preset_names()])
def test_who_may_have_hidden_caches_is_one_rule(name: str) -> None:
    """The engine, the compile check and the simulator agree, on qwen3-0.6b too: its hidden vectors
    are as large as its K, which two heads share."""
    _, config = model_shape(name)
    read = choose_read("auto", "aptserve", make_policy("aptserve"), config)
    shape = Model(
        config.num_layers,
        config.d_model,
        config.d_ff,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        rotary=config.rope is not None,
    )
    assert hidden_read_of(shape) == read
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tensor",))
    case = make_case(name, host(1 << 60), mesh, SIZES, "xla")
    assert case.offers_hidden == (read is not None)
