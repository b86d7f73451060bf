"""The flag --policies."""

from __future__ import annotations

from jaxserve.sched.registry import make_policy, policies
from jaxserve.server.startup.launch import UsageError


def policy_names(text: str | None) -> list[str]:
    """The policies of --policies, separated by commas; all policies without it. Raises UsageError
    for unknown or repeated names."""
    names = text.split(",") if text else list(policies())
    for name in names:
        try:
            make_policy(name)
        except ValueError as error:
            raise UsageError(f"--policies: {error}") from error
    if len(set(names)) < len(names):
        raise UsageError("--policies: one is there twice")
    return names
