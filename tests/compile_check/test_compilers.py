"""The small version of `make compile-check`: the real compilers, one GPU and one TPU target.

The first run installs them (under a minute on a good line). Where that cannot be done the tests
are skipped, and say that nothing was checked; where CI is set they fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.presets import preset
from jaxserve.pallas_kernels.gpu_mosaic.common import missing

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BOX = ROOT / "jaxserve" / "assets" / "tiny-stories"
TARGETS = ("v5e", "a100")
LAYERS = 40  # of opt-13b
# Kernels that no step of the model in the box has; alone, those of the steps compile as they do
# there. `make compile-check` has them all.
BESIDE_STEPS = "projected decode,move,stage out,stage in,to the host and back"


def not_checked(why: str) -> None:
    """Skips the test; where CI is set it fails, since nobody reads there what was skipped."""
    stop = pytest.fail if os.environ.get("CI") else pytest.skip
    stop(f"not checked: {why}")


@pytest.fixture(scope="session")
def compilers() -> Path:
    """The Python of .venv-compile."""
    path = ROOT / "tools" / "compile_check" / "install.py"
    spec = importlib.util.spec_from_file_location("compile_check_install", path)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    try:
        return Path(tool.install())
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        not_checked(f"the compilers cannot be installed: {said[-1]}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model in the box with half its layers: each is compiled anew, the third as the second.
    Its requests may be so long that the tables of 128 are more than a TPU's scalar memory holds."""
    hf = json.loads((BOX / "config.json").read_text())
    folder = tmp_path_factory.mktemp("tiny")
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 1 << 16}
    (folder / "config.json").write_text(json.dumps({**hf, **changes}))
    return f"--model={folder}"


def check(python: Path, *flags: str) -> list[dict[str, Any]]:
    """What the command says of every target; it must exit with 0."""
    ran = subprocess.run(
        [python, "-m", "jaxserve", "compile-check", *flags, "--json"],
        cwd=ROOT,
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "XLA_")) and name != "PYTHONDONTWRITEBYTECODE"
        }
        | {"PYTHONPATH": "lab"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout.splitlines()[-1])["targets"])


def assert_compiled(found: dict[str, Any]) -> None:
    assert found["programs"]
    on_gpu = found["target"] in ("a100", "h100")
    assert found["backend"] == ("triton" if on_gpu else "tpu"), found
    for program in found["programs"]:
        assert program["status"] == "compiled", program
        assert program["problems"] == [], program
        assert program["memory"]["arguments"] > 0
        if on_gpu:
            assert program["kernels"], program
            assert all(use["registers"] > 0 for use in program["kernels"])


def assert_in_place(found: dict[str, Any]) -> None:
    """No step copies the pool: not to the kernels' order and back either, which a TPU's compiler
    does with heads of less than 128 elements unless it is told how the pool lies."""
    for program in found["programs"]:
        if "step" in program["program"]:
            memory = program["memory"]
            assert memory["aliased"] >= found["pool_bytes"], program
            assert memory["temporaries"] < found["pool_bytes"], program


def test_ci_skips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does this test: to be skipped where it should fail would pass."""
    for ci, outcome in (("1", pytest.fail.Exception), ("", pytest.skip.Exception)):
        monkeypatch.setenv("CI", ci)
        with pytest.raises(BaseException, match="not checked: no network") as stopped:
            not_checked("no network")
        assert stopped.type is outcome


def test_a_small_model_compiles(compilers: Path, tiny: str) -> None:
    """Steps, and the kernels that they have not, for a GPU after a TPU in one process: jax starts
    its plugins with the first of them."""
    targets, programs = f"--target={','.join(TARGETS)}", f"--programs=steps,{BESIDE_STEPS}"
    both = check(compilers, targets, tiny, programs, "--max_batch_tokens=256", "--lora=4:8")
    assert tuple(found["target"] for found in both) == TARGETS
    for found in both:
        assert_compiled(found)
        assert_in_place(found)
        wanted = {"decode step", "hidden mixed step", "mixed step with adapters"}
        assert wanted | {*BESIDE_STEPS.split(",")} <= {
            program["program"] for program in found["programs"]
        }


def test_the_decode_step_of_opt_13b_compiles(compilers: Path) -> None:
    """On a TPU v5e it needs several devices: collectives are compiled too."""
    targets = f"--target={','.join(TARGETS)}"
    both = check(compilers, targets, "--model=opt-13b", "--programs=decode step")
    for found, devices in zip(both, (2, 1), strict=True):
        assert_compiled(found)
        assert found["programs"][0]["fits"] is True
        assert found["devices"] == devices
        assert found["weights_bytes"] * devices > 25e9
        (step,) = found["programs"]
        assert step["memory"]["temporaries"] < 64 << 20
        traffic = step["traffic"]
        # Each layer's weights once, and little beside.
        assert 0.98 * found["weights_bytes"] < traffic["floor"] < 1.02 * found["weights_bytes"]
        assert traffic["floor"] <= traffic["moved"] < 1.2 * traffic["floor"]
        if found["target"] == "a100":
            assert traffic["kernels"] <= 13 * LAYERS + 26  # those of the step's plan and sampling


def test_experts_compile(compilers: Path, tmp_path: Path) -> None:
    """Two of Mixtral's layers, whole on a GPU and cut over four TPUs: weights are multiplied where
    they lie, and on the GPU by the kernel that reads only experts with rows."""
    hf = preset("mixtral-8x7b") | {"num_hidden_layers": 2, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    programs = "--programs=decode step,prefill and mixed step"
    both = check(compilers, "--target=v5e:4,a100", f"--model={tmp_path}", programs)
    for found, devices in zip(both, (4, 1), strict=True):
        assert_compiled(found)
        assert_in_place(found)
        assert found["devices"] == devices
        assert found["weights_bytes"] * devices > 2 * 8 * 3 * 4096 * 14336 * 2
        for program in found["programs"]:
            assert program["weights_moved"] == 0
            names = {use["name"] for use in program["kernels"]}
            assert ("by_group" in names) == (found["target"] == "a100")


def test_sums_of_a_deterministic_step_do_not_depend_on_its_size(compilers: Path, tiny: str) -> None:
    """And those of a GPU's other steps do, where XLA splits products by it."""
    found: dict[tuple[str, str], list[dict[str, int]]] = {}
    for size in ("--max_rows=32 --max_batch_tokens=256", "--max_rows=48 --max_batch_tokens=496"):
        programs = "--programs=deterministic step,prefill and mixed step"
        for each in check(
            compilers, f"--target={','.join(TARGETS)}", tiny, programs, *size.split()
        ):
            assert_compiled(each)
            for program in each["programs"]:
                found.setdefault((each["target"], program["program"]), []).append(program["sums"])
    for target in TARGETS:
        small, large = found[target, "deterministic step"]
        assert small == large and small["f32 reduce 256"] and small["bf16 dot 1024"]
    small, large = found["a100", "prefill and mixed step"]
    assert small != large


def test_two_gpus_share_a_model(compilers: Path, tiny: str) -> None:
    """Both ways of attention over KV and over hidden caches are in these."""
    programs = "--programs=decode step,hidden mixed step,prompt log-probabilities,hidden to KV"
    (found,) = check(compilers, "--target=a100:2", tiny, programs, "--max_batch_tokens=256")
    assert_compiled(found)
    assert found["topology"] == "1x1x2"


def test_two_hosts_share_a_model(compilers: Path, tmp_path: Path) -> None:
    """Of four TPUs each, and of eight GPUs each; the model in the box is too narrow for those."""
    hf = json.loads((BOX / "config.json").read_text())
    wide = {"num_hidden_layers": 1, "num_attention_heads": 16}
    wide |= {"hidden_size": 1024, "word_embed_proj_dim": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**hf, **wide}))
    flags = (f"--model={tmp_path}", "--programs=decode step", "--max_batch_tokens=256")
    both = check(compilers, "--target=v5e:8,h100:16", *flags)
    for found, devices, topology in zip(both, (8, 16), ("v5e:2x4", "1x2x8"), strict=True):
        assert_compiled(found)
        assert (found["devices"], found["topology"]) == (devices, topology)
        assert found["hosts"] == 2


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_decodes_compile_with_mosaic_gpu(compilers: Path) -> None:
    """By Mosaic's compiler, of whose kernels XLA knows neither the PTX nor the shared memory."""
    flags = ("--model=llama-3-8b", "--programs=decode attention", "--backend=mosaic-gpu")
    both = check(compilers, "--target=h100,h200", *flags)
    for found in both:
        (program,) = found["programs"]
        assert (program["status"], program["problems"]) == ("compiled", []), program
        uses = {use["name"]: use for use in program["kernels"]}
        decode = uses["paged_decode_mosaic_gpu_kernel"]
        assert 0 < decode["registers"] <= 255 and decode["spill_stores"] == 0
        # Four tiles of K and V, and what is beside them.
        assert 4 * 2 * 64 * 128 * 2 < decode["shared"] <= 227 << 10
        assert "merge_parts" in uses


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_steps_with_mosaic_gpu_are_one_command_buffer(compilers: Path) -> None:
    """Nor do its kernels for prompts spill with heads of 64."""
    programs = "--programs=decode step,prefill attention"
    flags = ("--model=qwen2.5-0.5b", programs, "--backend=mosaic-gpu")
    (found,) = check(compilers, "--target=h100", *flags)
    for program in found["programs"]:
        assert (program["status"], program["problems"]) == ("compiled", []), program
        assert not any(use["spill_stores"] for use in program["kernels"]), program
    names = {use["name"] for program in found["programs"] for use in program["kernels"]}
    assert {"paged_decode_mosaic_gpu_kernel", "paged_prefill_mosaic_gpu_kernel"} <= names
