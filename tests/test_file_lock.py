"""Who may hold a file beside whom."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from jaxserve.file_lock import lock

OTHER = """
import sys
from pathlib import Path
from jaxserve.file_lock import lock
held = lock(Path(sys.argv[1]), shared=sys.argv[2] == "shared")
print("held" if held else "in use", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("theirs", ["shared", "alone"])
def test_another_process_holds_it(tmp_path: Path, theirs: str) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", OTHER, str(path), theirs]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        mine = lock(path, shared=True)
        assert (mine is not None) == (theirs == "shared")
        if mine is not None:
            mine.close()
        assert lock(path) is None
        other.kill()
    held = lock(path, wait=True)  # a process that has died holds nothing
    assert held is not None
    held.close()


def test_a_file_that_its_holder_removed_is_made_again(tmp_path: Path) -> None:
    path, made = tmp_path / "lock", list[IO[str]]()

    def opened() -> IO[str]:
        made.append(path.open("a"))
        if len(made) == 1:
            path.unlink()
        return made[-1]

    held = lock(path, opened=opened)
    assert len(made) == 2 and made[0].closed and held is made[1]
    assert lock(path) is None
    held.close()


def test_where_none_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lock(tmp_path / "none" / "lock")
