"""tools/mutants.py: no mutant is stale, and the verdicts are right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = load()
MUTANTS = mutants.read()


def test_every_mutant_fits_the_tree() -> None:
    """Whoever changes a line that the list names brings the list along."""
    assert len(MUTANTS) >= 40
    stale = {mutant.name: mutant.stale(ROOT) for mutant in MUTANTS if mutant.stale(ROOT)}
    assert not stale
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text().replace(mutant.old, mutant.new)
        compile(source, mutant.file, "exec")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "double.py").write_text("def double(x):\n    return x + x\n")
    (tmp_path / "test_double.py").write_text(
        "from double import double\n\n\ndef test_two():\n    assert double(2) == 4\n"
    )
    return tmp_path


def mutant(old: str, new: str, test: str = "test_double.py") -> mutants.Mutant:
    return mutants.Mutant("mine", "double.py", old, new, (test,), "doubling")


def test_verdicts(tree: Path) -> None:
    before = (tree / "double.py").read_text()
    killed = mutants.judge(mutant("x + x", "x + 1"), tree)
    assert (killed.state, killed.by) == ("killed", "test_double.py::test_two")
    survived = mutants.judge(mutant("x + x", "x * x"), tree)
    assert (survived.state, survived.by) == ("SURVIVED", "doubling")
    assert (tree / "double.py").read_text() == before


@pytest.mark.parametrize(
    ("old", "new", "test", "problem"),
    [
        ("x - x", "x", "test_double.py", "occurs 0 times in double.py"),
        ("x", "y", "test_double.py", "occurs 3 times in double.py"),
        ("x + x", "x + x", "test_double.py", "changes nothing"),
        ("x + x", "x * x", "test_gone.py", "there is no test_gone.py"),
    ],
)
def test_a_stale_mutant_is_said_to_be(
    tree: Path, old: str, new: str, test: str, problem: str
) -> None:
    verdict = mutants.judge(mutant(old, new, test), tree)
    assert verdict.state == "stale" and problem in verdict.by


def test_the_copy_is_of_the_tree_as_it_is(tmp_path: Path) -> None:
    mutants.copy_tree(tmp_path)
    assert (tmp_path / "tools" / "mutants.py").read_text() == Path(mutants.__file__).read_text()
    assert (tmp_path / "jaxserve" / "sched").is_symlink()
    assert not (tmp_path / ".git").exists()


def test_a_list_that_is_wrong_is_refused(tmp_path: Path) -> None:
    entry = '[[mutant]]\nname = "a"\nfile = "f"\nold = "o"\nnew = ""\ntests = []\nbreaks = "b"\n'
    (tmp_path / "twice.toml").write_text(entry * 2)
    with pytest.raises(ValueError, match="two mutants are named a"):
        mutants.read(tmp_path / "twice.toml")
    (tmp_path / "short.toml").write_text(entry.replace('new = ""\n', ""))
    with pytest.raises(ValueError, match="new"):
        mutants.read(tmp_path / "short.toml")
