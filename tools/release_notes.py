"""The notes of a release: its version's section in CHANGELOG.md.

    python -m tools.release_notes v0.2.0

The tag's version must be jaxserve's own. Needs only Python.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tools.repository import ROOT, address


class NoRelease(ValueError):
    """Says in one line why this is no release's tag."""


def notes(tag: str, root: Path = ROOT) -> str:
    """The section, with links to the files of that tag.

    Args:
        tag: vX.Y.Z.
        root: Of the clone.

    Raises:
        NoRelease: The tag is malformed or of another version, or has no section.
    """
    version = tag.removeprefix("v")
    if tag == version or not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise NoRelease(f"{tag}: a release's tag is vX.Y.Z")
    module = (root / "jaxserve" / "__init__.py").read_text(encoding="utf-8")
    own = re.findall(r'^__version__ = "(.*)"$', module, re.M)
    if own != [version]:
        raise NoRelease(f"{tag}: jaxserve.__version__ is {own[0]}")
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(version)}$\n(.*?)(?=^## |\Z)", changelog, re.S | re.M)
    if match is None or not match[1].strip():
        raise NoRelease(f"{tag}: CHANGELOG.md has no section {version}")
    text = match[1].strip() + "\n"
    base = address(root).repository
    # Links are relative to the clone; the notes are shown elsewhere.
    link = rf"]({base}/blob/{tag}/\1" if base else r"](\1"
    return re.sub(r"\]\((?![a-z]+:)([^)#])", link, text)


if __name__ == "__main__":
    try:
        print(notes(*sys.argv[1:2]), end="")
    except (NoRelease, TypeError) as error:
        sys.exit(str(error))
