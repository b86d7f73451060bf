"""What runs models: the extra `server` of the distribution, which a client does without."""

from __future__ import annotations

import importlib.util

EXTRAS = ("cpu", "cuda12", "tpu")
"""Of the distribution; each brings it."""


def problem(name: str, error: ModuleNotFoundError) -> str | None:
    """What to say of a module that is missing because only the client is installed.

    Args:
        name: what needs it, such as "jaxserve serve".
        error: that import raised.

    Returns:
        One line; None where the serving stack is there, and the error is about something else.
    """
    if importlib.util.find_spec("jax") is not None:
        return None
    extras = f"{', '.join(EXTRAS[:-1])} or {EXTRAS[-1]}"
    return (
        f"{name} needs what runs models, and only the client is installed (no module "
        f"{error.name}): install jaxserve-llm with its extra {extras}"
    )
