"""What was measured on a machine, as files beside a page's numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jaxserve.machine import machine, versions


def write(path: Path, command: str, name: str, found: Sequence[Any], **more: Any) -> None:
    """As JSON, with the machine and the versions; makes the folder where there is none.
    PackageNotFoundError where jaxserve was never installed.

    Args:
        path: of the file.
        command: that measured it.
        name: what the dataclasses `found` are called.
        found: what was measured.
        more: what else is to be known.
    """
    content = {"command": command, "machine": machine(), "versions": versions(), **more}
    content[name] = [asdict(one) for one in found]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read(path: Path, **kinds: Callable[..., Any]) -> dict[str, Any]:
    """What `write` wrote, with `where` for a page; empty if there is no such file. kinds: the
    dataclasses to read, by name; the first names what was measured. ValueError if the file holds
    something else."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        where, jax = content["machine"], content["versions"]["jax"]
        for name, kind in kinds.items():
            found = content[name]
            one = isinstance(found, dict)
            content[name] = kind(**found) if one else [kind(**each) for each in found]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not measured {next(iter(kinds))} ({error})") from error
    return {**content, "where": f"{where['cpu']}, {where['cores']} cores; jax {jax}"}
