"""Turns errors while an engine is built into one line for whoever configured it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jaxserve.config import ConfigError
from jaxserve.hosts.rank import GroupError
from jaxserve.weights import CheckpointError

OUT_OF_MEMORY = (
    "out of memory: lower cache.memory_gib, cache.memory_fraction or cache.num_blocks, or "
    "scheduler.max_batch_tokens and scheduler.max_rows"
)


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raises ConfigError for errors of the configuration, the checkpoint, or too little memory.
    GroupError passes unchanged."""
    try:
        yield
    except (ConfigError, GroupError):
        raise
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from error
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(f"{OUT_OF_MEMORY} ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of the error's message; its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
