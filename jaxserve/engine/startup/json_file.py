"""A small file that one start writes and the next ones read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class JsonFile:
    """A JSON object in a file.

    Args:
        path: the file; its folder is made when something is put.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """The object; empty if there is no file, or it is not ours."""
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def write(self, content: dict[str, Any]) -> None:
        """Writes the object atomically, even if other processes write, too. Raises OSError."""
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self._path)

    def put(self, name: str, value: Any) -> None:
        """Sets a field. Logs if it cannot be written."""
        content = self.read()
        if content.get(name) == value:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.write({**content, name: value})
        except OSError as error:
            problem = "nothing can be kept in %s for the next start: %s"
            log.warning(problem, self._path.name, error)
