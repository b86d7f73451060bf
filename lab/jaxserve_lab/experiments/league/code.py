"""Which code a number came from, so that a league goes on only with numbers that still hold."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import jaxserve.sched.registry
from jaxserve.sched.registry import PolicyName, make_policy
from jaxserve.simulator import simulator
from jaxserve_lab.experiments.league import runs, workloads

_SCHED = tuple(
    f"{part}*.py" for part in ("", "state/", "cache/", "cost/", "slo/", "fairness/", "unified/")
)
_SIMULATOR = (
    *(f"{part}*.py" for part in ("", "compiled/", "oracle/", "replica/", "systems/", "workloads/")),
    "systems/*.json",
)
_POLICIES = "jaxserve.sched.policies"
DIGITS = 10


@cache
def code_of(policy: str = "") -> str:
    """Hash of the code that a simulation of the policy runs: that of `of_all`, and the policy's own
    files. Hexadecimal. policy: "" for what depends on no policy. ValueError for an unknown one."""
    return _digest(of_all(), *(_content(path) for path in _ordered(_own(policy) if policy else ())))


@cache
def of_all() -> str:
    """Hash of the scheduler, the simulator and the league's setting."""
    files = {Path(module.__file__ or "") for module in (runs, workloads)}
    for module, patterns in ((jaxserve.sched.registry, _SCHED), (simulator, _SIMULATOR)):
        folder = Path(module.__file__ or "").parent
        for pattern in patterns:
            found = set(folder.glob(pattern))
            assert found, f"there is no {folder / pattern}"
            files |= found
    return _digest(*(_content(path) for path in _ordered(files)))


def _ordered(files: Iterable[Path]) -> list[Path]:
    """In an order that does not depend on where the folder is."""
    return sorted(files, key=lambda path: (path.name, str(path)))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:DIGITS]


def _content(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return _plain(text) if path.suffix == ".py" else text


def _plain(text: str) -> str:
    """Code without its comments and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            del body[0]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(getattr(value, "value", None), str)


def _own(policy: str) -> set[Path]:
    """The policy's file, and those of other policies that it imports, one from the other."""
    made, said = make_policy(policy), PolicyName.parse(policy)
    if said.path:
        return {Path(said.path).expanduser().resolve(), *_imported([type(made).__module__])}
    return _imported([type(made).__module__, *_registering(said.base)])


def _registering(name: str) -> list[str]:
    """The module that makes the policy of that name: perhaps a function beside its class."""
    from jaxserve.sched.registry import policies

    return [policies()[name].make.__module__]


def _imported(modules: list[str]) -> set[Path]:
    files, todo = set(), [name for name in modules if name.startswith(_POLICIES)]
    while todo:
        spec = sys.modules[todo[-1]].__spec__ or importlib.util.find_spec(todo[-1])
        path = Path((spec and spec.origin) or "")
        todo.pop()
        if path in files:
            continue
        files.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_POLICIES):
                assert node.module is not None
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                todo += [name for name in (node.module, *names) if name in sys.modules]
    return files
