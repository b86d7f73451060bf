"""The ways in: an installed command and a clone, from another folder, that nobody can write to."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebooks.packages import ROOT, clone, install
from tests.server.processes import serve

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages with the package from a wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    return install(clone(folder / "source"), folder / "site")


def script(site: Path) -> tuple[str, ...]:
    """What pip makes `jaxserve` of."""
    (metadata,) = site.glob("jaxserve_llm-*.dist-info/entry_points.txt")
    found = configparser.ConfigParser()
    found.read(metadata)
    module, _, function = found["console_scripts"]["jaxserve"].partition(":")
    return (sys.executable, "-c", f"from {module} import {function} as f; f()")


@pytest.mark.parametrize("way", ["script", "module"])
def test_a_wheel_serves_the_model_in_the_box_from_another_folder(
    wheel: Path, tmp_path: Path, way: str
) -> None:
    program = script(wheel) if way == "script" else (sys.executable, "-m", "jaxserve")
    environment = {"PYTHONPATH": str(wheel), "NUMBA_CACHE_DIR": str(wheel.parent / "numba")}
    with serve(program=(*program, "serve"), cwd=tmp_path, **environment) as served:
        done = subprocess.run(
            [*program, "complete", "Once upon a time", f"--address={served.address}"],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.startswith("Once upon a time, there was ")


def test_a_clone_that_nobody_can_write_to(tmp_path: Path) -> None:
    tree = clone(tmp_path)
    shutil.copy(ROOT / "serve.py", tree)
    paths = [tree, *tree.rglob("*")]
    for path in paths:
        if not path.is_symlink():
            path.chmod(0o555 if path.is_dir() else 0o444)
    environment = {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # root may write all the same
    try:
        with serve(program=(sys.executable, str(tree / "serve.py")), cwd=tmp_path, **environment):
            pass
        assert {*tree.rglob("*")} == {*paths[1:]}
    finally:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
