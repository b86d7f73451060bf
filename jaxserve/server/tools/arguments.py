"""Arguments of the calls in a chat so far. Clients may also send nothing, or half an object."""

from __future__ import annotations

import json
from typing import Any


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments by name, as templates want them. Nothing, and null, is {}. Text that is not a
    JSON object is kept under the name ""."""
    value = _loaded(arguments)
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"": arguments}


def as_json(arguments: str) -> str:
    """The arguments as JSON; text that is a JSON object is left as it is."""
    if isinstance(_loaded(arguments), dict):
        return arguments
    return json.dumps(as_object(arguments), ensure_ascii=False)


def _loaded(arguments: str) -> Any:
    if not arguments.strip():
        return None
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value
