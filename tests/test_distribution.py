"""Nobody is told to install what is not ours: PyPI's `jaxserve` is somebody else's package."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAB = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
INSTALLS = re.compile(r"""\bpip["']?,? ["']?install[ \t]+([^\n]+)""")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] != "jaxserve"
    own = {NAME.match(each).group() for each in _all() if each.startswith("jaxserve")}  # type: ignore[union-attr]
    assert own == {PROJECT["name"], LAB["name"]}


def _all() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(each for extra in extras for each in extra)]


def _told() -> list[tuple[str, str]]:
    """Each file in which something follows `pip install`, and what that is."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    told = []
    for name in files.stdout.decode().split("\0"):
        path = ROOT / name
        if not path.is_file() or path.is_symlink() or path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        told += [(name, found.group(1)) for found in INSTALLS.finditer(text)]
    return told


@pytest.mark.promise(36)
def test_no_line_tells_anybody_to_install_it_by_a_name() -> None:
    told = _told()
    assert len(told) > 10  # else the expression finds nothing any more
    for name, words in told:
        for word in re.split(r"""[\s"'`()]+""", words.partition("#")[0]):
            assert not re.match(r"jaxserve(-llm|-lab)?(\[.*)?$", word), (
                f"{name}: pip install {words}"
            )


@pytest.mark.parametrize("extra", ["cpu", "notebook"])
def test_the_extras_that_notebooks_install_exist(extra: str) -> None:
    assert extra in PROJECT["optional-dependencies"]
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f"{PROJECT['name']}[cpu,notebook] @ " in notebook.read_text()
