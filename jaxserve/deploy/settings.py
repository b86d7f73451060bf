"""Settings of a deployment: `serve run jaxserve.deploy.ray:app NAME=VALUE`, or `args` in the config
of `serve deploy`."""

from __future__ import annotations

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from jaxserve.sched.routing.moves import parse_link, parse_roles
from jaxserve.sched.routing.routers import ROUTERS

ENGINE, INGRESS = "engine", "ingress"
"""Ray Serve's names of the two deployments."""


class Settings(BaseModel):
    """Settings by name.

    Attributes:
        flags: flags of serve.py for every replica; a text is split like in a shell.
        routing: a name in `ROUTERS`.
        link: what a move between replicas costs, as `parse_link` reads it; "": requests move only
            where they have to.
        roles: how many replicas compute prompts, and how many what follows, as `parse_roles` reads
            it; "": all do both.
        replicas: initial and least number.
        max_replicas: if larger, replicas are added and removed by load.
        ingresses: number of processes that estimate the cost of calls, each with its own router.
        hosts: number of hosts that serve the model together, as one replica.
        num_cpus, num_gpus, resources: what Ray gives to each host.
        snapshot_s: seconds between a replica's snapshots.
        upscale_delay_s, downscale_delay_s: seconds that more, or fewer, replicas must be wanted.
    """

    model_config = ConfigDict(extra="forbid")

    flags: list[str] = []
    routing: str = "slo"
    link: str = ""
    roles: str = ""
    replicas: int = Field(default=2, ge=1, le=1024)
    max_replicas: int = Field(default=0, ge=0, le=1024)
    ingresses: int = Field(default=1, ge=1, le=64)
    hosts: int = Field(default=1, ge=1, le=256)
    num_cpus: float = Field(default=1.0, ge=0.0)
    num_gpus: float = Field(default=0.0, ge=0.0)
    resources: dict[str, float] = {}
    snapshot_s: float = Field(default=0.5, ge=0.1, le=10.0)
    upscale_delay_s: float = Field(default=10.0, ge=0.0)
    downscale_delay_s: float = Field(default=120.0, ge=0.0)

    @field_validator("flags", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return shlex.split(value) if isinstance(value, str) else value

    @field_validator("routing")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ROUTERS:
            raise ValueError(f"there is no routing {value!r}; known: {', '.join(ROUTERS)}")
        return value

    @property
    def router(self) -> dict[str, Any]:
        """The arguments of `SnapshotRouter`."""
        link = parse_link(self.link) if self.link else None
        return {
            "routing": self.routing,
            "link": link and [link.latency, link.per_token],
            "roles": list(parse_roles(self.roles)) if self.roles else [0, 0],
        }

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of each host, by Ray's names."""
        named = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: count for name, count in named.items() if count > 0}

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.hosts > 1 and not self.bundle:
            raise ValueError("num_cpus: with hosts, Ray has to reserve something of each; got 0")
        if 0 < self.max_replicas < self.replicas:
            limits = f"must be 0 or at least replicas ({self.replicas})"
            raise ValueError(f"max_replicas: {limits}, got {self.max_replicas}")
        if self.link:
            parse_link(self.link)
            if self.routing != "slo":
                raise ValueError(f"link: is for routing slo, got {self.routing}")
            if self.hosts > 1:
                raise ValueError("link: a replica over several hosts sends no cache")
        if self.roles:
            count = sum(parse_roles(self.roles))
            if not self.link:
                raise ValueError("roles: needs link: what a move between replicas costs")
            if self.max_replicas > self.replicas or count != self.replicas:
                fixed = f"must be together replicas ({self.replicas}), without max_replicas"
                raise ValueError(f"roles: {fixed}, got {self.roles}")
        return self
