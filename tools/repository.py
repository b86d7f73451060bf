"""Where the project is published, as `[tool.jaxserve]` in pyproject.toml says.

    python -m tools.repository           # `make address`: writes the address into files
    python -m tools.repository --check   # or lists files that differ
    python -m tools.repository --image   # prints the image's name

If it is empty, no file names an address. Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "begin: python -m tools.repository", "end"
GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com"
# A reserved host name (RFC 2606), for manifests before there is an address.
NO_IMAGE = "registry.example.com/jaxserve"
TAGS = "(?:cpu|cuda12|tpu)"


class BadAddress(ValueError):
    """Says in one line what is wrong."""


@dataclass(frozen=True)
class Address:
    """Where the project is published.

    Attributes:
        repository: Address of the repository, https://HOST/OWNER/NAME; "" if there is none yet.
        image: Name of the image without a tag, HOST/OWNER/NAME; "" likewise.

    Raises:
        BadAddress: A field is malformed.
    """

    repository: str = ""
    image: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(https://[\w.-]+/[\w.-]+/[\w.-]*[\w-])?", self.repository):
            raise BadAddress(f"repository = {self.repository!r} is not https://HOST/OWNER/NAME")
        if self.repository.endswith(".git"):
            raise BadAddress(f"repository = {self.repository!r}: without .git")
        if not re.fullmatch(r"([a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)+)?", self.image):
            raise BadAddress(f"image = {self.image!r} is not HOST/OWNER/NAME in small letters")

    def badge(self, notebook: str) -> str:
        """The link that opens the notebook in Colab; "" unless the repository is on GitHub."""
        if not self.repository.startswith(GITHUB):
            return ""
        path = f"{self.repository.removeprefix(GITHUB)}/blob/main/notebooks/{notebook}"
        return f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{path})"

    def page(self, path: str) -> str:
        """A page of the repository."""
        return f"{self.repository}/{path}"


def address(root: Path = ROOT) -> Address:
    """Reads the address. Raises BadAddress."""
    fields = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "jaxserve"
    ]
    return Address(fields["repository"], fields["image"])


def written(root: Path = ROOT) -> dict[Path, str]:
    """Each file that contains the address, with its correct text. Raises BadAddress."""
    at = address(root)
    texts = {}
    for name, change in _files(root):
        path = root / name
        texts[path] = change(path.read_text(encoding="utf-8"), at)
    return texts


def _files(root: Path) -> Iterator[tuple[str, Callable[[str, Address], str]]]:
    yield "pyproject.toml", _metadata
    yield "README.md", _readme
    yield "SECURITY.md", _security
    yield "Dockerfile", _dockerfile
    for name in ("deploy/kubernetes/deployment.yaml", "deploy/kubernetes/ray.yaml"):
        yield name, _images
    yield "docs/kubernetes.md", _images
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        name = path.name
        yield f"notebooks/{name}", lambda text, at, name=name: _notebook(text, at, name)


def _between(text: str, lines: list[str]) -> str:
    """`text` with these lines between its markers."""
    parts = re.fullmatch(
        rf"(.*?^[^\n]*{BEGIN}[^\n]*\n).*?(^(?:#|<!--) {END}\b.*)", text, re.S | re.M
    )
    if parts is None:
        raise BadAddress(f"there is no {BEGIN!r} and {END!r} in\n{text[:200]}")
    return parts[1] + "".join(f"{line}\n" for line in lines) + parts[2]


def _metadata(text: str, at: Address) -> str:
    urls = {
        "Homepage": at.repository,
        "Documentation": at.page("blob/main/docs/README.md"),
        "Changelog": at.page("blob/main/CHANGELOG.md"),
        "Issues": at.page("issues"),
    }
    lines = ["[project.urls]", *(f'{name} = "{url}"' for name, url in urls.items())]
    return _between(text, lines if at.repository else [])


def _readme(text: str, at: Address) -> str:
    if not at.repository:
        return _between(text, [])
    badge = at.badge("quickstart.ipynb")
    clone = f"    git clone {at.repository}\n    cd {at.repository.rpartition('/')[2]}"
    return _between(text, [*([badge, ""] if badge else []), clone])


def _security(text: str, at: Address) -> str:
    form = 'the "Report a vulnerability" form'
    if at.repository:
        where = f"[{form}]({at.page('security/advisories/new')})"
    else:
        where = f"{form} of the repository's Security tab"
    return _between(text, [f"Please report a vulnerability in private, by {where}."])


def _dockerfile(text: str, at: Address) -> str:
    label = f'LABEL org.opencontainers.image.source="{at.repository}"'
    return _between(text, [label] if at.repository else [])


def _images(text: str, at: Address) -> str:
    return re.sub(rf"[\w.:-]+(?:/[\w.-]+)+(?=:{TAGS}\b)", at.image or NO_IMAGE, text)


def _notebook(text: str, at: Address, name: str) -> str:
    book = json.loads(text)
    first = next(cell["source"] for cell in book["cells"] if cell["cell_type"] == "code")
    source = re.compile(r'^SOURCE = ".*?"')
    first[:] = [source.sub(f'SOURCE = "{at.repository}"', line) for line in first]
    # The badge is a paragraph under the title.
    top = book["cells"][0]["source"]
    if top[2].startswith("[![Open in Colab]"):
        del top[1:3]
    if badge := at.badge(name):
        top[1:1] = ["\n", f"{badge}\n"]
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> str:
    """Runs the command and returns its output. Raises BadAddress."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if files differ")
    parser.add_argument("--at", default="", help="with --check, the expected repository")
    parser.add_argument("--image", action="store_true", help="print the image's name")
    asked = parser.parse_args(arguments)
    at = address(root)
    if asked.image:
        return at.image
    if asked.at and asked.at != at.repository:
        raise BadAddress(f"pyproject.toml says repository = {at.repository!r}, this is {asked.at}")
    new = {path: text for path, text in written(root).items() if path.read_text("utf-8") != text}
    names = ", ".join(sorted(path.relative_to(root).as_posix() for path in new))
    if asked.check:
        if new:
            raise BadAddress(f"run `make address`: {names}")
        return ""
    for path, text in new.items():
        path.write_text(text, encoding="utf-8")
    return f"written: {names}" if new else "nothing to change"


if __name__ == "__main__":
    try:
        print(main())
    except BadAddress as error:
        sys.exit(str(error))
