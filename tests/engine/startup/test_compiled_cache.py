"""The folder of compiled steps: what cannot be written, and what is damaged."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxserve.engine.startup import compilation_cache
from jaxserve.engine.startup.compilation_cache import INDEX, note, remove_damaged, use
from tests.engine.harness import SCARCE, engine, generate, write_shape

ENTRIES = {f"jit_{name}-cache": zlib.compress(name.encode() * 1000) for name in "abc"}


@pytest.fixture(autouse=True)
def jaxs_own() -> Iterator[None]:
    """JAX's settings are as they were."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in ENTRIES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "jit_a-atime").write_bytes(b"12345678")
    return tmp_path


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*-cache")}


@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        lambda content: b"\x28\xb5\x2f\xfd" + content[4:],
    ],
)
def test_damaged_entries_are_removed_and_the_others_stay(
    folder: Path, noted: bool, damage, caplog: pytest.LogCaptureFixture
) -> None:
    if noted:
        note(str(folder))
    (folder / "jit_b-cache").write_bytes(damage(ENTRIES["jit_b-cache"]))
    assert use(str(folder)) == str(folder)
    assert entries(folder) == {name: ENTRIES[name] for name in ("jit_a-cache", "jit_c-cache")}
    assert caplog.messages == [
        f"engine.compilation_cache_dir: 1 damaged entry removed from {folder}, to be compiled again"
    ]
    assert remove_damaged(folder) == 0


def test_whatever_jax_has_written_may_be_noted(folder: Path) -> None:
    other = b"\x28\xb5\x2f\xfd of another compressor"
    (folder / "jit_d-cache").write_bytes(other)
    note(str(folder))
    assert remove_damaged(folder) == 0
    (folder / "jit_a-cache").unlink()  # by whoever cleans up
    note(str(folder))
    (folder / "jit_a-cache").write_bytes(zlib.compress(b"compiled anew"))
    assert remove_damaged(folder) == 0
    (folder / INDEX).write_text("[damaged, too")
    assert remove_damaged(folder) == 1  # of which nothing is known


def test_a_folder_that_cannot_be_written_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    options = {"engine__compilation_cache_dir": str(tmp_path / "file" / "cache"), **SCARCE}
    with engine(write_shape(tmp_path, "opt"), scheduler__policy="aptserve", **options) as running:
        assert generate(running, [[5, 6, 7]], max_tokens=4)[0]
    (line,) = [each for each in caplog.messages if "compilation_cache" in each or "kept" in each]
    assert line.startswith("engine.compilation_cache_dir: nothing can be")


@pytest.mark.promise(33)
def test_what_was_damaged_is_whole_after_the_next_start(tmp_path: Path) -> None:
    """With JAX itself, which does not write an entry that is there."""
    script = f"""
import sys, jax, jax.numpy as jnp
from jaxserve.engine.startup import compilation_cache
compilation_cache.use({str(tmp_path)!r})
print(jax.jit(lambda x: x * 2 + 1)(jnp.arange(3)))
compilation_cache.note({str(tmp_path)!r})
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[1 3 5]\n"
    whole = entries(tmp_path)
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content[:-20])
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "[1 3 5]\n"
    assert f"{len(whole)} damaged entr" in done.stderr
    assert "Error reading" not in done.stderr
    assert entries(tmp_path).keys() == whole.keys()
    assert compilation_cache.remove_damaged(tmp_path) == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_refused_start_takes_its_folder_with_it_unless_somebody_has_compiled(
    tmp_path: Path, compiled: bool
) -> None:
    """Another first start beside it may have."""
    new = tmp_path / "cache" / "xla"
    with pytest.raises(ValueError, match="refused"), compilation_cache.gone_if_refused(str(new)):
        new.mkdir(parents=True)
        (new / "pools.json").write_text("{}")
        if compiled:
            (new / "jit_a-cache").write_bytes(b"x")
        raise ValueError("refused")
    assert list(tmp_path.iterdir()) == ([tmp_path / "cache"] if compiled else [])
