"""Systems that the simulator runs on, and their profiles on disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxserve.sched.cost.cost_model import (
    BatchFeatures,
    Coefficients,
    CostModel,
    InferMaxCostModel,
    LinearCostModel,
)
from jaxserve.sched.cost.host_overhead import HostOverhead
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.cost.step_residuals import Scatter
from jaxserve.sched.json_records import is_count, is_number, read_record

FORMAT = 5
MOST = 2**31 - 1  # tokens, rows, layers: the limit of int32 arrays
STEP_SECONDS = (1e-9, 1e6)  # range for the time of a step of one token


class UnknownSystem(ValueError):
    """A system that does not exist or cannot be read; the message says why."""


@dataclass(frozen=True)
class System:
    """What the simulator runs on: a model on a device, with its cost model and default limits.

    Attributes:
        cost_model: Cost model of its steps.
        kv_tokens: M, tokens of KV cache.
        max_batch_tokens: C.
        max_prefill_tokens: P; None for the simulator's default.
        max_rows: Most requests in a batch; None for no limit.
        block_size: Tokens per block; None for the value of the rules.
        paper: The cost model under the rules `infermax_paper`, if the authors published one.
        padding: The shapes that the engine rounds batches up to; None for none.
        host: Time of the host's thread around a step.
        about: Where the numbers come from.
        rho: Added seconds of a step for each token that it reads from a hidden cache instead of K
        and V (Apt-Serve Eq. 6). May be negative; None if there are no hidden caches.
        projects: Whether such a read projects every vector into K and V, see `View`.
        scatter: How measured steps deviate from the cost model; None for not at all.
        state_groups: Groups of layers with a state (`StateGroups`); 0 for none.
        state_slots: Slots, each in one plane and layer, of a state in each of them.
        transport: Seconds by which clients get all tokens of a request later.

    Raises:
        ValueError: A field is out of range, or the cost model's time of a step of one token is
            implausible.
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
    host: HostOverhead = field(default_factory=HostOverhead)
    about: dict[str, Any] = field(default_factory=dict)
    rho: float | None = None
    projects: bool = False
    scatter: Scatter | None = None
    state_groups: int = 0
    state_slots: int = 0
    transport: float = 0.0

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "max_batch_tokens"):
            _whole(name, getattr(self, name))
        for name in ("max_prefill_tokens", "max_rows", "block_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if not (self.rho is None or is_number(self.rho)):
            raise ValueError(f"rho must be a number, got {self.rho!r:.40}")
        if not (is_number(self.transport) and self.transport >= 0):
            raise ValueError(f"transport must be 0 or more seconds, got {self.transport!r:.40}")
        for step in (BatchFeatures(1, 1, 1, 1, 0, 0, 0), BatchFeatures(1, 1, 0, 0, 1, 1, 0)):
            seconds = float(self.cost_model.batch_time(step))
            if not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
                raise ValueError(
                    f"a step of one token takes {seconds:g} s; it must take {STEP_SECONDS[0]:g} to "
                    f"{STEP_SECONDS[1]:g}"
                )

    def cost_under(self, rules: str) -> CostModel:
        """The cost model for a set of rules (`simulator.RULES`)."""
        if rules == "infermax_paper" and self.paper is not None:
            return self.paper
        return self.cost_model

    def save(self, path: str | Path) -> None:
        """Writes the system as JSON for `load`, without `paper` and `scatter`."""
        model = self.cost_model
        profile = _Profile(
            format=FORMAT,
            num_layers=model.num_layers,
            seconds_per_layer=model.coefficients,
            overlapped=model.overlapped,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            host_s=self.host,
            **{name: getattr(self, name) for name in _SAME},
        )
        content = asdict(profile)
        if self.rho is None:
            del content["rho"], content["projects"]
        if not self.state_groups:
            del content["state_groups"], content["state_slots"]
        if not self.transport:
            del content["transport"]
        if not model.num_experts:
            del content["num_experts"], content["experts_per_token"]
            del content["seconds_per_layer"]["per_expert"]
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Profile:
    """The content of the file."""

    format: int
    name: str
    num_layers: int
    seconds_per_layer: Coefficients
    overlapped: bool
    host_s: HostOverhead
    kv_tokens: int
    max_batch_tokens: int
    max_prefill_tokens: int | None
    max_rows: int | None
    block_size: int | None
    padding: Padding | None
    about: dict[str, Any]
    rho: float | None = None
    projects: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    state_groups: int = 0
    state_slots: int = 0
    transport: float = 0.0


_SAME = {field.name for field in fields(_Profile)} & {field.name for field in fields(System)}


def load(path: str | Path) -> System:
    """Reads a system written by `System.save`. UnknownSystem names the file and the problem."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return _system(content)
    except OSError as error:
        raise UnknownSystem(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnknownSystem(f"{path}: not a system profile ({error})") from error


def _system(content: Any) -> System:
    known = content if isinstance(content, dict) else {}
    if known.get("format", FORMAT) != FORMAT:  # the other fields are in that format
        raise ValueError(f"format {known['format']!r:.20}, this version reads {FORMAT}")
    profile = read_record(_Profile, content)
    if "rho" in known and "projects" not in known:
        raise ValueError("projects is missing")
    model = LinearCostModel(
        profile.seconds_per_layer,
        profile.num_layers,
        profile.overlapped,
        profile.num_experts,
        profile.experts_per_token,
    )
    same = {name: getattr(profile, name) for name in _SAME}
    return System(cost_model=model, host=profile.host_s, **same)


def _whole(name: str, value: Any) -> None:
    if not (is_count(value) and 1 <= value <= MOST):
        raise ValueError(f"{name} must be a whole number from 1 to {MOST}, got {value!r:.40}")
