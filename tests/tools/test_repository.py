"""The project's address has one place, and all that name it are in accord with that."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.notebooks.packages import ROOT
from tools.repository import NO_IMAGE, BadAddress, main, written

REPOSITORY = "https://github.com/someone/serving"
IMAGE = "images.example.com/someone/serving"
FILES = [path.relative_to(ROOT) for path in written()]
PLACES = ("README.md", "SECURITY.md", "Dockerfile", "docs/kubernetes.md")


def copy(root: Path, repository: str, image: str) -> Path:
    """The files that say it, where this is the address."""
    for file in FILES:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, root / file)
    return publish(root, repository, image)


def publish(root: Path, repository: str, image: str) -> Path:
    path = root / "pyproject.toml"
    text = path.read_text()
    for name, value in (("repository", repository), ("image", image)):
        text, times = re.subn(rf'(?m)^{name} = ".*?"', f'{name} = "{value}"', text)
        assert times == 1
    path.write_text(text)
    main([], root)
    return root


def test_the_clone_is_in_accord_with_its_one_place() -> None:
    assert main(["--check"]) == ""


def test_without_an_address_nothing_names_one(tmp_path: Path) -> None:
    root = copy(tmp_path, "", "")
    assert "urls" not in tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for file in PLACES:
        text = (root / file).read_text()
        assert not re.search(r"git clone|colab|image\.source|someone|security/advisories", text)
    assert NO_IMAGE in (root / "deploy/kubernetes/deployment.yaml").read_text()
    for path in (root / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert "colab.research" not in str(cells)
        assert 'SOURCE = ""' in "".join(first_code(cells))


def test_an_address_reaches_every_place(tmp_path: Path) -> None:
    root = copy(tmp_path, REPOSITORY, IMAGE)
    assert main(["--check", "--at", REPOSITORY], root) == ""
    assert main(["--image"], root) == IMAGE
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Homepage"] == REPOSITORY and urls["Issues"] == f"{REPOSITORY}/issues"
    readme = (root / "README.md").read_text()
    assert f"    git clone {REPOSITORY}\n    cd serving\n" in readme
    assert "/github/someone/serving/blob/main/notebooks/quickstart.ipynb)" in readme
    form = f"({REPOSITORY}/security/advisories/new)."
    assert form in (root / "SECURITY.md").read_text()
    label = f'LABEL org.opencontainers.image.source="{REPOSITORY}"\n'
    assert label in (root / "Dockerfile").read_text()
    for file in FILES:
        text = (root / file).read_text()
        assert NO_IMAGE not in text
        if "kubernetes" in str(file):
            assert f"{IMAGE}:cuda12" in text
        if file.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            badge = f"/github/someone/serving/blob/main/notebooks/{file.name})\n"
            assert cells[0]["source"][2].endswith(badge)
            assert f'SOURCE = "{REPOSITORY}"' in "".join(first_code(cells))


def first_code(cells: list[dict[str, list[str]]]) -> list[str]:
    return next(cell["source"] for cell in cells if cell["cell_type"] == "code")  # type: ignore[comparison-overlap]


def test_what_an_address_changed_goes_with_it(tmp_path: Path) -> None:
    """Written twice, moved, and taken away, it leaves what was there before."""
    root = copy(tmp_path, "", "")
    before = {file: (root / file).read_text() for file in FILES}
    publish(root, REPOSITORY, IMAGE)
    once = {file: (root / file).read_text() for file in FILES}
    assert main([], root) == "nothing to change"
    publish(root, "https://code.example.com/someone/serving", "")
    for file in FILES:
        assert "colab.research" not in (root / file).read_text()  # Colab opens GitHub's only
    publish(root, REPOSITORY, IMAGE)
    assert {file: (root / file).read_text() for file in FILES} == once
    publish(root, "", "")
    assert {file: (root / file).read_text() for file in FILES} == before


def test_a_file_that_says_otherwise_is_named(tmp_path: Path) -> None:
    root = copy(tmp_path, REPOSITORY, IMAGE)
    path = root / "SECURITY.md"
    path.write_text(path.read_text().replace("someone", "somebody"))
    with pytest.raises(BadAddress, match=r"run `make address`: SECURITY\.md$"):
        main(["--check"], root)
    with pytest.raises(BadAddress, match=r"this is https://github\.com/fork"):
        main(["--check", "--at", "https://github.com/fork/serving"], root)


@pytest.mark.parametrize(
    ("repository", "image", "wrong"),
    [
        ("github.com/someone/serving", "", "is not https://HOST/OWNER/NAME"),
        (f"{REPOSITORY}/", "", "is not https://HOST/OWNER/NAME"),
        (f"{REPOSITORY}.git", "", "without .git"),
        (REPOSITORY, f"{IMAGE}:latest", "is not HOST/OWNER/NAME"),
        (REPOSITORY, "images.example.com/Someone/serving", "in small letters"),
    ],
)
def test_what_is_no_address_is_refused(
    tmp_path: Path, repository: str, image: str, wrong: str
) -> None:
    with pytest.raises(BadAddress, match=wrong):
        copy(tmp_path, repository, image)


def test_no_other_file_says_where_the_project_is() -> None:
    """Once it is known, it stands where the command writes it, and nowhere else."""
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["jaxserve"]
    said = [each for each in repository.values() if each]
    for each in said:
        found = subprocess.run(["git", "grep", "-lF", each], cwd=ROOT, capture_output=True)
        assert set(found.stdout.decode().split()) <= {str(file) for file in FILES}
