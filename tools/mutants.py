"""Breaks the code on purpose, one small defect at a time, and says which test notices.

    python tools/mutants.py                      # all of tools/mutants.toml
    python tools/mutants.py --only=no-watermark  # one, or several with commas
    python tools/mutants.py --list

Each mutant is applied in a temporary copy of the tree, uncommitted changes included; the checkout
itself is never touched. Before that the named tests run once as they are: a mutant can be killed
only by tests that pass without it. Exit status 1 if one survived, is stale, or the tests fail.

Mutation analysis: DeMillo, Lipton and Sayward, "Hints on test data selection", Computer 11 (1978).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Mutant:
    """One defect: `old`, which occurs exactly once in `file`, becomes `new`. tests: paths for
    pytest. breaks: what goes wrong then, in a line. Paths are relative to the root."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str

    def apply(self, root: Path) -> str:
        """Changes the file in that tree; its text before. ValueError if the mutant is stale."""
        problem = self.stale(root)
        if problem:
            raise ValueError(problem)
        path = root / self.file
        text = path.read_text()
        path.write_text(text.replace(self.old, self.new))
        return text

    def stale(self, root: Path) -> str:
        """Why it no longer fits the tree, or nothing."""
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        count = path.read_text().count(self.old)
        if count != 1:
            return f"its old text occurs {count} times in {self.file}"
        if self.old == self.new:
            return "it changes nothing"
        gone = [test for test in self.tests if not (root / test).exists()]
        return f"there is no {gone[0]}" if gone else ""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. state: killed, SURVIVED or stale; by: the test, or the problem."""

    mutant: Mutant
    state: str
    by: str = ""


def read(path: Path = LIST) -> list[Mutant]:
    """All mutants of the list. ValueError if two have one name, or a field is missing or wrong."""
    entries = tomllib.loads(path.read_text())["mutant"]
    try:
        mutants = [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    names = [mutant.name for mutant in mutants]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{path}: two mutants are named {', '.join(sorted(twice))}")
    return mutants


def copy_tree(to: Path) -> None:
    """What git tracks, or would if it were added, as it is now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, to / name, follow_symlinks=False)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether they pass in that tree; if not, which failed first."""
    env = dict(os.environ, PYTHONPATH=str(tree), CI="1")
    # Files change within a second and keep their size: byte code by time stamp would be stale.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    # Steps that a mutant leaves alone need not be compiled again.
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".venv" / "test-caches" / "xla"))
    options = ["-n", "0", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT_S} s"
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 0:
        return True, ""
    return False, failed[1] if failed else (done.stdout + done.stderr)[-500:]


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Applies the mutant in the tree, runs its tests, and puts the tree back."""
    try:
        before = mutant.apply(tree)
    except ValueError as error:
        return Verdict(mutant, "stale", str(error))
    try:
        passed, by = run_tests(tree, mutant.tests)
    finally:
        (tree / mutant.file).write_text(before)
    return Verdict(mutant, "SURVIVED" if passed else "killed", mutant.breaks if passed else by)


def judge_all(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """The verdicts, printed as they come. RuntimeError if the tests fail without any mutant."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for job in range(jobs):
            copy_tree(Path(folder) / str(job))
            trees.put(Path(folder) / str(job))
        sound = [m for m in mutants if not m.stale(Path(folder) / "0")]
        tests = sorted({test for mutant in sound for test in mutant.tests})
        print(f"as they are: {' '.join(tests)}", flush=True)
        passed, by = run_tests(Path(folder) / "0", tests) if tests else (True, "")
        if not passed:
            raise RuntimeError(f"the tests fail without any mutant: {by}")

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                verdict = judge(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{verdict.state:8}  {mutant.name:34}  {verdict.by}", flush=True)
            return verdict

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, mutants))


def main() -> int:
    """Exit code: 0 if no mutant survived or is stale, else 1."""
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    args = parser.parse_args()
    mutants = read()
    if args.only:
        wanted = args.only.split(",")
        unknown = set(wanted) - {mutant.name for mutant in mutants}
        if unknown:
            parser.error(f"there is no mutant {', '.join(sorted(unknown))}; see --list")
        mutants = [mutant for mutant in mutants if mutant.name in wanted]
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name:34}  {mutant.file}: {mutant.breaks}")
        return 0
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    try:
        verdicts = judge_all(mutants, args.jobs)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    states = [verdict.state for verdict in verdicts]
    counted = (f"{states.count(state)} {state}" for state in ("killed", "SURVIVED", "stale"))
    print(f"{len(verdicts)} mutants: {', '.join(counted)}")
    return int(states.count("killed") < len(states))


if __name__ == "__main__":
    sys.exit(main())
