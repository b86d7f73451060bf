"""Why an answer goes on at another replica; apart from the record, which needs pydantic."""

from __future__ import annotations

from typing import Literal

Why = Literal["", "lost", "drained", "prefilled", "late"]
"""The first was lost, or was to go; or another one is better for decodes, or is in time where the
first is late."""
