"""A release, as far as it can be tried without the hosts that it talks to."""

from __future__ import annotations

import glob
import itertools
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from jaxserve import __version__
from tests.notebooks.packages import ROOT, clone
from tools.release_notes import NoRelease, notes

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RAY_SETTINGS = "jaxserve/configs/deploy/ray.yaml"
"""Which only a clone has."""
RELEASE = ROOT / ".github" / "workflows" / "release.yml"


def tree(root: Path, repository: str = "") -> Path:
    (root / "jaxserve").mkdir()
    (root / "jaxserve" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    (root / "pyproject.toml").write_text(
        f'[tool.jaxserve]\nrepository = "{repository}"\nimage = ""\n'
    )
    (root / "CHANGELOG.md").write_text(
        "# Changelog\n\n## 1.2.0\n\n### Added\n\n- Much ([docs/a.md](docs/a.md#b), "
        "[there](https://example.com)).\n\n## 1.1.0\n\n- Little.\n\n## 1.0.0\n"
    )
    return root


def test_notes_are_the_section_of_the_tag(tmp_path: Path) -> None:
    root = tree(tmp_path)
    said = notes("v1.2.0", root)
    assert said.startswith("### Added\n\n- Much ([docs/a.md](docs/a.md#b)") and "Little" not in said


def test_links_of_notes_lead_to_the_files_of_the_tag(tmp_path: Path) -> None:
    root = tree(tmp_path, "https://code.example.com/a/b")
    said = notes("v1.2.0", root)
    assert "](https://code.example.com/a/b/blob/v1.2.0/docs/a.md#b)" in said
    assert "](https://example.com)" in said


@pytest.mark.parametrize(
    ("tag", "version", "wrong"),
    [
        ("1.2.0", "1.2.0", "a release's tag is vX.Y.Z"),
        ("v1.2", "1.2", "a release's tag is vX.Y.Z"),
        ("v1.1.0", "1.2.0", "jaxserve.__version__ is 1.2.0"),
        ("v1.3.0", "1.3.0", "CHANGELOG.md has no section 1.3.0"),
        ("v1.0.0", "1.0.0", "CHANGELOG.md has no section 1.0.0"),  # an empty one
    ],
)
def test_a_tag_without_a_version_or_notes_is_none(
    tmp_path: Path, tag: str, version: str, wrong: str
) -> None:
    root = tree(tmp_path)
    (root / "jaxserve" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    with pytest.raises(NoRelease, match=wrong):
        notes(tag, root)


def test_this_version_could_be_released() -> None:
    assert notes(f"v{__version__}").strip()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_valid(path: Path) -> None:
    """By GitHub's schema; what a job needs are jobs; and what they run is bash."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    workflow = yaml.safe_load(path.read_text())
    for job in workflow["jobs"].values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(workflow["jobs"])
        for step in job["steps"]:
            if "run" in step:
                subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True)


def test_the_workflow_calls_commands_as_they_are() -> None:
    """With this clone for the one that is released."""
    text = RELEASE.read_text()
    commands = re.findall(r"python -m (tools\.\S+)([^>)\n]*)", text)
    assert {name for name, _ in commands} == {"tools.repository", "tools.release_notes"}
    for name, rest in commands:
        words = shlex.split(rest.replace("$GITHUB_REF_NAME", f"v{__version__}"))
        if "--at" in words:
            del words[words.index("--at") :]
        done = subprocess.run([sys.executable, "-m", name, *words], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("place", "name", "package"),
    [
        pytest.param("", "jaxserve_llm", "jaxserve", marks=pytest.mark.slow),
        ("lab", *["jaxserve_lab"] * 2),
    ],
)
def test_the_sdist_makes_the_wheel_that_the_clone_makes(
    place: str, name: str, package: str, tmp_path: Path
) -> None:
    """Whose top folders are links. Both have the version in their names, all files of their own
    package, and nothing of the other."""
    folder = clone(tmp_path / "source") / place
    build(folder, "sdist", tmp_path)
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert sdist.name == f"{name}-{__version__}.tar.gz"
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    found = []
    for source, made in ((folder, tmp_path / "one"), (unpacked, tmp_path / "two")):
        made.mkdir()
        build(source, "wheel", made)
        (wheel,) = made.glob("*.whl")
        assert f"{wheel.name.partition('-py3')[0]}" == f"{name}-{__version__}"
        assert wheel.name in RELEASE.read_text().replace("${GITHUB_REF_NAME#v}", __version__)
        found.append(set(zipfile.ZipFile(wheel).namelist()))
    first, second = found
    assert first == second
    assert set(tracked(folder / package)) - first == ({RAY_SETTINGS} if not place else set())
    assert {file.split("/")[0] for file in first} == {package, f"{name}-{__version__}.dist-info"}


def tracked(package: Path) -> list[str]:
    """The files of a package in a clone, by their names in a wheel."""
    files = (Path(name) for name in glob.glob(f"{package}/**/*.*", recursive=True))
    return [file.relative_to(package.parent).as_posix() for file in files]


def build(source: Path, what: str, place: Path) -> None:
    script = f"from setuptools import build_meta as b; b.build_{what}({str(place)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=source, check=True, capture_output=True)


def test_images_are_of_extras_that_exist_and_that_manifests_name() -> None:
    workflow = yaml.safe_load(RELEASE.read_text())
    extras = workflow["jobs"]["image"]["strategy"]["matrix"]["extras"]
    known = (ROOT / "pyproject.toml").read_text()
    for one in itertools.chain.from_iterable(each.split(",") for each in extras):
        assert re.search(rf"(?m)^{one} = \[", known)
    pages = [*(ROOT / "deploy" / "kubernetes").glob("*.yaml"), ROOT / "docs" / "kubernetes.md"]
    named = set(re.findall(r"/jaxserve:([\w-]+)", "".join(page.read_text() for page in pages)))
    assert named <= {each.replace(",", "-") for each in extras}
