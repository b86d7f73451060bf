"""A system: what the simulator runs on, and its profile on disk."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.sched.cost_model import (
    Coefficients,
    CostModel,
    HostTerms,
    InferMaxCostModel,
    LinearCostModel,
    Padding,
)

FORMAT = 3


class UnknownSystem(ValueError):
    """A system that is not known or cannot be read; one line says why."""


@dataclass(frozen=True)
class System:
    """What the simulator runs on.

    kv_tokens: M, tokens of KV cache. max_batch_tokens: C; max_prefill_tokens: P, max_rows and
    block_size: None where it does not say. paper: the cost model under the rules `infermax_paper`,
    where the authors published one. padding: the shapes that an engine rounds its batches up to.
    host: what its host's thread takes beside. about: where it comes from. rho: seconds that a step
    takes longer for every token that it reads from a hidden cache instead of from K and V
    (Apt-Serve Eq. 6), which may be negative; None where hidden caches cannot be had. projects:
    whether that read projects every vector into K and V, see `View`.
    """

    name: str
    cost_model: LinearCostModel
    kv_tokens: int
    max_batch_tokens: int = 4096
    max_prefill_tokens: int | None = None
    max_rows: int | None = None
    block_size: int | None = None
    paper: InferMaxCostModel | None = None
    padding: Padding | None = None
    host: HostTerms = field(default_factory=HostTerms)
    about: dict[str, Any] = field(default_factory=dict)
    rho: float | None = None
    projects: bool = False

    def cost_under(self, rules: str) -> CostModel:
        """The cost model that goes with a set of rules (`simulator.RULES`)."""
        if rules == "infermax_paper" and self.paper is not None:
            return self.paper
        return self.cost_model

    def save(self, path: str | Path) -> None:
        """Writes the system as JSON; `load` reads it back. The paper's own cost model is not part
        of the file."""
        padding = None if self.padding is None else asdict(self.padding)
        content = {
            "format": FORMAT,
            "name": self.name,
            "num_layers": self.cost_model.num_layers,
            "seconds_per_layer": self.cost_model.coefficients.as_dict(),
            "host_s": self.host.as_dict(),
            "kv_tokens": self.kv_tokens,
            "max_batch_tokens": self.max_batch_tokens,
            "max_prefill_tokens": self.max_prefill_tokens,
            "max_rows": self.max_rows,
            "block_size": self.block_size,
            "padding": padding,
            "about": self.about,
        }
        if self.rho is not None:
            content |= {"rho": self.rho, "projects": self.projects}
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(path: str | Path) -> System:
    """A system from the JSON of `System.save`. UnknownSystem names the file and what is wrong."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UnknownSystem(f"{path}: format {content['format']}, this version reads {FORMAT}")
        padding = content["padding"]
        return System(
            content["name"],
            LinearCostModel(
                Coefficients(**content["seconds_per_layer"]),
                content["num_layers"],
            ),
            content["kv_tokens"],
            content["max_batch_tokens"],
            content["max_prefill_tokens"],
            content["max_rows"],
            content["block_size"],
            padding=padding and _padding(**padding),
            host=HostTerms(**content["host_s"]),
            about=content["about"],
            rho=_rho(content.get("rho")),
            projects=_projects(content.get("projects", False)),
        )
    except OSError as error:
        raise UnknownSystem(f"{path}: {error.strerror}") from error
    except KeyError as error:
        raise UnknownSystem(f"{path}: not a system profile, {error} is missing") from error
    except (TypeError, ValueError) as error:
        if isinstance(error, UnknownSystem):
            raise
        raise UnknownSystem(f"{path}: not a system profile ({error})") from error


def _padding(rows: list[int], tokens: list[int], decode_group: int) -> Padding:
    return Padding(tuple(rows), tuple(tokens), decode_group)


def _rho(value: Any) -> float | None:
    """As a profile has it. ValueError if it is neither a number nor left out."""
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"rho must be a number of seconds, got {value!r}")
    return value


def _projects(value: Any) -> bool:
    """As a profile has it. ValueError if it is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"projects must be true or false, got {value!r}")
    return value
