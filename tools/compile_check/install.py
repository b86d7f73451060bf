"""Makes .venv-compile, with the compilers of `jaxserve_lab.compile_check`; prints its Python.

    python tools/compile_check/install.py

Does nothing if it is there and requirements.txt has not changed. With Python 3.12 it is
.venv-compile-3.12 and so on, since the jax version differs, too. It is separate because jax prints
long warnings if the CUDA plugin is installed without a GPU.
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
    """The environment's Python. One process installs, others wait for it. Raises CalledProcessError
    if pip fails; its stderr says why."""
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
            # Most modules are never imported; Python compiles the others on import.
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
