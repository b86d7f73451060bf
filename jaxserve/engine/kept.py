"""What an engine has found out about itself, kept beside the compiled steps for the next start."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxserve.sched.cost_model import Coefficients

log = logging.getLogger(__name__)

FILE_NAME = "timing.json"


def find(directory: str, key: dict[str, Any]) -> Coefficients | None:
    """What was kept in the directory under this key; None if nothing was, or in no file of ours.
    directory: "" for none."""
    known = _read(_path(directory)) if directory else {}
    return known.get(_name(key))


def keep(directory: str, key: dict[str, Any], found: Coefficients) -> None:
    """Adds it to what is kept there. directory: "" for nowhere. Where nothing can be written it
    says so, and nothing is kept."""
    if not directory:
        return
    path = _path(directory)
    known = {**_read(path), _name(key): found}
    content = {name: value.as_dict() for name, value in known.items()}
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        log.warning("the next start will time the steps again, nothing can be kept: %s", error)


def _path(directory: str) -> Path:
    return Path(os.path.expanduser(directory)) / FILE_NAME


def _name(key: dict[str, Any]) -> str:
    """With the names of the coefficients: those of another version are of no use."""
    named = {**key, "coefficients": [field.name for field in fields(Coefficients)]}
    return json.dumps(named, sort_keys=True)


def _read(path: Path) -> dict[str, Coefficients]:
    """Empty if there is none, or it is none of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): Coefficients(**value) for name, value in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
