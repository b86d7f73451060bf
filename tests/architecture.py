"""Reads the tables of docs/architecture.md and the tree, and says where they differ.

The page's tables are the only list. A part is a folder, or a module with a row of its own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

PAGE = "docs/architecture.md"
MODULES_LISTED = ("./", "jaxserve/", "sched/", "pallas_kernels/")  # one row a module in these
SKIPPED = re.compile(r"(\.|__pycache__$|build$|dist$|.*\.egg-info$)")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
MAX_FUNCTION, MAX_FILE = 60, 700


@dataclass(frozen=True)
class Row:
    """A part as the page has it. imports: parts that it may import besides itself. libraries:
    import names of other distributions."""

    imports: frozenset[str]
    libraries: frozenset[str]


@dataclass(frozen=True)
class Page:
    """rows: by part, in the page's order. modules: files that have a row in a list of modules."""

    rows: Mapping[str, Row]
    modules: frozenset[str]


def read_page(text: str) -> Page:
    """Reads every table whose header begins with `part` or with `module`."""
    rows: dict[str, Row] = {}
    modules: set[str] = set()
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif set(cells[0]) <= set("-: "):
            continue
        elif header[0] == "part":
            at = dict(zip(header, cells, strict=True))
            row = Row(*(frozenset(_names(at[column])) for column in ("imports", "libraries")))
            for name in _names(cells[0]):
                if name in rows:
                    raise ValueError(f"{PAGE}: {name} is listed twice")
                rows[name] = row
        elif header[0] == "module":
            modules.update(_names(cells[0]))
    return Page(rows, frozenset(modules))


def _names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@dataclass(frozen=True)
class Import:
    """One import. source: the file. target: a file of the tree, or a library's import name.
    typing: only type checkers follow it."""

    source: str
    target: str
    line: int
    typing: bool


@dataclass
class Tree:
    """The files below a root, by their paths from it, and the imports of the product's."""

    root: Path
    files: list[str] = field(init=False)
    linked: frozenset[str] = field(init=False)  # folders that are imported as jaxserve.X

    def __post_init__(self) -> None:
        self.files = sorted(_walk(self.root, self.root))
        inside = (self.root / "jaxserve").glob("*")
        self.linked = frozenset(path.name for path in inside if path.is_symlink())

    @property
    def folders(self) -> set[str]:
        """Those that hold a file, as "jaxserve/engine/"; the top is "./"."""
        return {_folder(file) for file in self.files}

    @property
    def sources(self) -> list[str]:
        """Python files."""
        return [file for file in self.files if file.endswith(".py")]

    @property
    def product(self) -> list[str]:
        """Python files outside tests/."""
        return [file for file in self.sources if not file.startswith("tests/")]

    def parse(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text(encoding="utf-8"), file)

    def imports(self) -> list[Import]:
        return [found for file in self.product for found in self._imports_of(file)]

    def _imports_of(self, file: str) -> Iterator[Import]:
        module = self.parse(file)
        typing = {
            id(inner)
            for node in ast.walk(module)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{_base(file, node)}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                target = self._resolve(file, name)
                if target is not None:
                    yield Import(file, target, node.lineno, id(node) in typing)

    def _resolve(self, file: str, name: str) -> str | None:
        """The file that holds `name`, the library that does, or None for Python's own."""
        parts = name.split(".")
        if parts[0] == "jaxserve" and self.linked.intersection(parts[1:2]):
            parts = parts[1:]
        here = Path(file).parent.parts
        places: list[tuple[str, ...]] = [()]
        if not self.linked.union(("jaxserve",)).intersection(here[:1]):
            places.append(here)  # a script finds the modules beside it
        for place in places:
            for end in range(len(parts), 0, -1):
                path = "/".join((*place, *parts[:end]))
                for candidate in (f"{path}.py", f"{path}/__init__.py"):
                    if (self.root / candidate).is_file():
                        return candidate
        return None if parts[0] in sys.stdlib_module_names else parts[0]


def _walk(root: Path, folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if SKIPPED.match(path.name):
            continue
        if path.is_dir():
            if not path.is_symlink():
                yield from _walk(root, path)
        else:
            yield path.relative_to(root).as_posix()


def _folder(file: str) -> str:
    return f"{Path(file).parent.as_posix()}/"


def _base(file: str, node: ast.ImportFrom) -> str:
    """The module that `from` names, in full."""
    if not node.level:
        return node.module or ""
    package = Path(file).parts[: -node.level]
    return ".".join((*package, *filter(None, [node.module])))


def unlisted(tree: Tree, page: Page) -> list[str]:
    """What the tree has and the page has not, and the other way round. A row `tests/**` stands for
    all folders below."""
    listed = set(page.rows) | page.modules
    deep = tuple(name.removesuffix("**") for name in listed if name.endswith("**"))
    there = {folder for folder in tree.folders - {"./"} if not folder.startswith(deep)}
    there |= {file for file in tree.product if _folder(file) in MODULES_LISTED}
    there -= {file for file in there if file.endswith("__init__.py")}
    there |= {f"{folder}**" for folder in deep if (tree.root / folder).is_dir()}
    found = [f"{name} is not listed in {PAGE}" for name in sorted(there - listed)]
    return found + [f"{PAGE} lists {name}, which is not there" for name in sorted(listed - there)]


def forbidden(tree: Tree, page: Page) -> list[str]:
    """Imports that the page does not allow."""
    found = []
    files = set(tree.files)
    for each in tree.imports():
        row = page.rows.get(_part(page, each.source))
        if row is None:
            continue  # `unlisted` says so
        target = each.target
        if target not in files:
            allowed = target in row.libraries
        else:
            target = _part(page, target)
            allowed = target == _part(page, each.source) or target in row.imports
        if not allowed:
            found.append(f"{each.source}:{each.line} imports {target}: not allowed in {PAGE}")
    return found


def upward(page: Page) -> list[str]:
    """Permissions that name a part above their own, or none at all."""
    place = {name: number for number, name in enumerate(page.rows)}
    return [
        f"{PAGE}: {name} may not import {target}, which is not below it"
        for name, row in page.rows.items()
        for target in sorted(row.imports)
        if place.get(target, -1) <= place[name]
    ]


def _part(page: Page, file: str) -> str:
    return file if file in page.rows else _folder(file)


def module_circles(tree: Tree) -> list[list[str]]:
    """Modules that import each other, at once or by way of others; imports inside functions count,
    imports for type checkers do not."""
    graph: dict[str, set[str]] = {file: set() for file in tree.product}
    for each in tree.imports():
        if not each.typing and each.target in graph and each.target != each.source:
            graph[each.source].add(each.target)
    return circles(graph)


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in graph[node]:
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            at = stack.index(node)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in order:
            visit(node)
    return found


def too_long(tree: Tree) -> list[str]:
    """Files and functions over the limits, generated ones apart."""
    found = []
    for file in (file for file in tree.sources if not GENERATED.search(file)):
        lines = (tree.root / file).read_text(encoding="utf-8").count("\n")
        if lines > MAX_FILE:
            found.append(f"{file} has {lines} lines, more than {MAX_FILE}")
        for node in ast.walk(tree.parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    name = f"{file}:{node.lineno} {node.name}"
                    found.append(f"{name} has {length} lines, more than {MAX_FUNCTION}")
    return found
