"""How a leader connects its group, and which settings must be the same on all hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.engine.engine import Engine
from jaxserve.engine.errors import HostLost
from jaxserve.engine.startup.choices.device_memory import free_memory
from jaxserve.engine.startup.config_errors import first_line
from jaxserve.hosts.group import Group, Starter, gather
from jaxserve.hosts.rank import GroupError, Rank
from jaxserve.hosts.runtime import reserved_address, start_jax

FACTS, BUILD = "facts", "build"
_SECTIONS = ("model", "cache", "scheduler", "engine", "mesh")
# What may be another on each host: where its own files are, and which one it is.
_OWN = frozenset(
    {
        "engine.compilation_cache_dir",
        "engine.record",
        "mesh.coordinator",
        "mesh.host_index",
        "mesh.hosts_wait_s",
    }
)


def host_profile(config: Config, rank: Rank) -> dict[str, Any]:
    """The settings that must be the same on all hosts, by name, in JSON's types."""
    fields: dict[str, Any] = {
        f"{section}.{name}": value
        for section, values in config.as_dict().items()
        for name, value in values.items()
        if section in _SECTIONS and f"{section}.{name}" not in _OWN
    }
    fields |= {"mesh.hosts": rank.hosts, "jaxserve": __version__, "jax": jax.__version__}
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain


def lead_group(
    config: Config, rank: Rank, starter: Starter | None = None
) -> tuple[Group, tuple[str, int]]:
    """Connects the group and starts JAX over all of it. starter: as in `gather`. Returns the group,
    and the device with the least free memory on any host: its name, and the free bytes. Raises
    GroupError."""
    profile = host_profile(config, rank)
    channels = gather(rank, profile, starter)
    with reserved_address(rank) as address:
        group = Group(channels, address)
        try:
            start_jax(rank, address)
            memory = [free_memory(), *_memory_of_others(group)]
        except Exception as error:
            group.close(first_line(error))
            raise
    return group, min(memory, key=lambda found: found[1])


def _memory_of_others(group: Group) -> Iterator[tuple[str, int]]:
    """`free_memory` of each other host."""
    kind = jax.local_devices()[0].device_kind
    for index, said in enumerate(group.answers(), 1):
        if said.fields["device"] != kind:
            theirs = f"host {index} has devices of kind {said.fields['device']}"
            raise GroupError(f"{theirs}, the leader of kind {kind}")
        name, free = said.fields["memory"]
        yield f"{name} of host {index}", int(free)


def share_fate(engine: Engine, group: Group) -> None:
    """Abandons the engine if a host is lost, and fails the group if the engine fails by itself."""

    def tell(error: BaseException) -> None:
        if not isinstance(error, HostLost):  # of that the group tells them itself
            group.fail(first_line(error))

    engine.add_failure_listener(tell)
    group.on_loss(lambda why: engine.abandon(HostLost(why)))
