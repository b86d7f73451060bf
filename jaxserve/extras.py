"""What not every installation has: what runs models (the extra `server`), which a client does
without, and the lab (the extra `lab`)."""

from __future__ import annotations

import importlib.util

EXTRAS = ("cpu", "cuda12", "tpu")
"""Extras that bring what runs models."""
LAB = "jaxserve_lab"
"""The lab's package: what measures, compares and makes pages. Nothing else here names it."""


def problem(name: str, error: ModuleNotFoundError) -> str | None:
    """What to say of a module that is missing because the lab is not installed, or only the client.

    Args:
        name: what needs it, such as "jaxserve serve".
        error: that import raised.

    Returns:
        One line; None where the error is about something else.
    """
    if error.name == LAB:
        return (
            f"{name} needs the lab, which is not installed (no module {LAB}): install jaxserve-llm "
            "with its extra lab"
        )
    if importlib.util.find_spec("jax") is not None:
        return None
    extras = f"{', '.join(EXTRAS[:-1])} or {EXTRAS[-1]}"
    return (
        f"{name} needs what runs models, and only the client is installed (no module "
        f"{error.name}): install jaxserve-llm with its extra {extras}"
    )
