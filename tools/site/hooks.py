"""mkdocs hooks: adds pages from the repository's root to those of docs/, and makes links to code
point to the repository, or plain text if it is not published."""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the root's pages.

    Args:
        files: Mkdocs' collection of files.
        config: Mkdocs' configuration.

    Returns:
        The same collection.
    """
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites a page's links.

    Args:
        markdown: The page's text.
        page: Mkdocs' page.

    Returns:
        The text, in which every relative link leads to a page of the site or to the repository.
    """
    folder = "" if page.file.src_uri in ROOT_PAGES else "docs"
    return _LINK.sub(lambda found: _rewritten(found, folder), markdown)


def _rewritten(found: re.Match[str], folder: str) -> str:
    picture, text, target = found.groups()
    if re.match(r"[a-z]+:|#", target):
        return found[0]
    path, mark, anchor = target.partition("#")
    there = posixpath.normpath(posixpath.join(folder, path))
    if there.startswith("docs/"):
        return f"{picture}[{text}]({there.removeprefix('docs/')}{mark}{anchor})"
    if there in ROOT_PAGES:
        return f"{picture}[{text}]({there}{mark}{anchor})"
    repository = _repository()
    return f"{picture}[{text}]({repository}/blob/main/{there})" if repository else text


def _repository() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(project["tool"].get("jaxserve", {}).get("repository", ""))
