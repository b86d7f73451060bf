"""Orbax checkpoints: a flat dict of parameters that restores straight onto the target devices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.models.base import Family, ModelConfig, Params, ParamSpec
from jaxserve.models.sharding import padded_shape, param_sharding
from jaxserve.weights.errors import CheckpointError

FOLDER = "params"


def is_orbax(folder: Path) -> bool:
    """Whether the directory holds a checkpoint written by `save_orbax`."""
    return (folder / FOLDER / "_METADATA").is_file()


def stored_names(folder: Path) -> list[str]:
    """The parameters' names in a checkpoint written by `save_orbax`. Raises CheckpointError if it
    is damaged."""
    import orbax.checkpoint as ocp

    location = (folder / FOLDER).resolve()
    try:
        with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
            return list(_stored_shapes(checkpointer, location))
    except CheckpointError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot read {location}: {reason}") from error


def save_orbax(folder: Path, params: Params) -> None:
    """Writes the parameters to `folder`/params, replacing existing ones."""
    import orbax.checkpoint as ocp

    flat = {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save((folder / FOLDER).resolve(), flat, force=True)


def load_orbax(
    folder: Path, family: Family, config: ModelConfig, *, dtype: np.dtype, mesh: Mesh | None
) -> Params:
    """Loads the parameters of a checkpoint written by `save_orbax`. Each device reads only its own
    part.

    Args:
        folder: the directory.
        family: the model's.
        config: its shape.
        dtype: dtype of parameters that are not quantised.
        mesh: the devices to shard over; None for one.

    Raises:
        CheckpointError: If the folder has no such checkpoint, a parameter is missing or has the
            wrong shape, or files are damaged.
    """
    import orbax.checkpoint as ocp  # late: takes 0.25 s, and most models do not need it

    if not is_orbax(folder):
        raise CheckpointError(f"no Orbax checkpoint in {folder / FOLDER}")
    paths, treedef = jax.tree_util.tree_flatten_with_path(family.param_specs(config))
    specs: dict[str, ParamSpec] = {_name(path): spec for path, spec in paths}
    restore_args = {
        name: ocp.ArrayRestoreArgs(
            sharding=param_sharding(mesh, spec),
            global_shape=padded_shape(mesh, spec),
            dtype=jnp.dtype(spec.dtype or dtype),
            strict=False,  # pads the vocabulary with zero rows
        )
        for name, spec in specs.items()
    }
    location = (folder / FOLDER).resolve()
    try:
        with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
            _check(_stored_shapes(checkpointer, location), specs)
            flat = checkpointer.restore(location, restore_args=restore_args)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"cannot read {location}: {reason}") from error
    return jax.tree.unflatten(treedef, [flat[name] for name in specs])


class _Loop(asyncio.SelectorEventLoop):
    """Orbax runs its reads in a loop that ends with the first failed read. The other reads end
    later, and each would print that the loop is closed."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, **options: Any
    ) -> Any:
        if self.is_closed():
            return None
        return super().call_soon_threadsafe(callback, *args, **options)


class _Loops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = _Loop


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's logging through absl. Errors are raised anyway."""
    log, policy = logging.getLogger("absl"), asyncio.get_event_loop_policy()
    level = log.level
    log.setLevel(logging.CRITICAL)
    asyncio.set_event_loop_policy(_Loops())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        log.setLevel(level)


def _name(path: tuple[Any, ...]) -> str:
    """A parameter's name, such as "layers.3.attn.q.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _stored_shapes(checkpointer: Any, location: Path) -> dict[str, tuple[int, ...]]:
    metadata = checkpointer.metadata(location)
    tree = getattr(metadata, "item_metadata", metadata)
    if tree is None:
        raise CheckpointError(f"cannot read {location}: its metadata are damaged")
    return {name: tuple(entry.shape) for name, entry in dict(tree).items()}


def _check(stored: dict[str, tuple[int, ...]], specs: dict[str, ParamSpec]) -> None:
    for name, spec in specs.items():
        if name not in stored:
            raise CheckpointError(f"the checkpoint has no parameter {name!r}")
        if stored[name] != spec.shape:
            raise CheckpointError(
                f"parameter {name!r}: expected shape {list(spec.shape)}, found {list(stored[name])}"
            )
    unknown = sorted(set(stored) - set(specs))
    if unknown:
        raise CheckpointError(f"the checkpoint's parameter {unknown[0]!r} is not in the model")
