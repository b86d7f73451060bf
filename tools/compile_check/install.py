"""Makes .venv-compile, with the compilers of `jaxserve_lab.compile_check`; prints its Python.

    python tools/compile_check/install.py

Does nothing when it is there and requirements.txt has not changed. By another Python than 3.11 it
is .venv-compile-3.12 and so on, since jax is another one too. An environment of its own, since an
ordinary start of jax complains at length when the CUDA plugin is there and a GPU is not.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MAJOR, _MINOR = sys.version_info[:2]
_SUFFIX = "" if (_MAJOR, _MINOR) == (3, 11) else f"-{_MAJOR}.{_MINOR}"
FOLDER = ROOT / f".venv-compile{_SUFFIX}"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def install() -> Path:
    """The environment's Python. One process installs, others wait for it. CalledProcessError when
    pip cannot; its stderr says why."""
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest() + sys.version
        ready, python = FOLDER / ".ready", FOLDER / "bin" / "python"
        if not ready.is_file() or ready.read_text() != wanted:
            ready.unlink(missing_ok=True)
            print(f"installing the compilers into {FOLDER.name}: 2 GB, minutes", file=sys.stderr)
            _run(sys.executable, "-m", "venv", str(FOLDER))
            pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            # Most of it is never imported: Python compiles what is.
            _run(str(python), *pip, "--no-compile", "-r", str(REQUIREMENTS))
            ready.write_text(wanted)
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        print(install())
    except subprocess.CalledProcessError as error:
        sys.exit(f"compile_check: not installed: {(error.stderr or error.stdout).strip()}")
