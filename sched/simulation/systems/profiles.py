"""A system: what the simulator runs on, and its profile on disk."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

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

FORMAT = 5
MOST = 2**31 - 1  # tokens, rows, layers: what arrays of int32 count to
STEP_SECONDS = (1e-9, 1e6)  # within which a step of one token takes


class UnknownSystem(ValueError):
    """A system that does not exist or cannot be read; one line says why."""


@dataclass(frozen=True)
class System:
    """What the simulator runs on: a model on a device, with its cost model and default limits.

    Attributes:
        cost_model: What its steps cost.
        kv_tokens: M, tokens of KV cache.
        max_batch_tokens: C.
        max_prefill_tokens: P; None for the simulator's default.
        max_rows: Requests of a batch; None for any number.
        block_size: Tokens of a block; None for the rules'.
        paper: The cost model under the rules `infermax_paper`, where the authors published one.
        padding: The shapes that the engine rounds batches up to; None for none.
        host: What the host's thread takes around a step.
        about: Where the numbers come from.
        rho: Seconds that a step takes longer for each token that it reads from a hidden cache
            instead of K and V (Apt-Serve Eq. 6). May be negative; None where there are no hidden
            caches.
        projects: Whether such a read projects every vector into K and V, see `View`.
        scatter: How steps deviate from the cost model, as measured; None for not at all.

    Raises:
        ValueError: A field is out of range, or the cost model gives a step of one token no sensible
            time.
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

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "max_batch_tokens"):
            _whole(name, getattr(self, name))
        for name in ("max_prefill_tokens", "max_rows", "block_size"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name))
        if self.rho is not None:
            _number("rho", self.rho)
        for step in (BatchFeatures(1, 1, 1, 1, 0, 0, 0), BatchFeatures(1, 1, 0, 0, 1, 1, 0)):
            seconds = float(self.cost_model.batch_time(step))
            if not STEP_SECONDS[0] <= seconds <= STEP_SECONDS[1]:
                raise ValueError(
                    f"a step of one token takes {seconds:g} s; it must take {STEP_SECONDS[0]:g} to "
                    f"{STEP_SECONDS[1]:g}"
                )

    def cost_under(self, rules: str) -> CostModel:
        """The cost model that goes with a set of rules (`simulator.RULES`)."""
        if rules == "infermax_paper" and self.paper is not None:
            return self.paper
        return self.cost_model

    def save(self, path: str | Path) -> None:
        """Writes the system as JSON for `load`, without `paper` and `scatter`."""
        padding = None if self.padding is None else asdict(self.padding)
        content = {
            "format": FORMAT,
            "name": self.name,
            "num_layers": self.cost_model.num_layers,
            "seconds_per_layer": self.cost_model.coefficients.as_dict(),
            "overlapped": self.cost_model.overlapped,
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
    """Reads a system that `System.save` wrote. Raises UnknownSystem with the file and what is
    wrong."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return _system(_object("a profile", content))
    except OSError as error:
        raise UnknownSystem(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UnknownSystem(f"{path}: not a system profile ({error})") from error


_FIELDS = (
    "format",
    "name",
    "num_layers",
    "seconds_per_layer",
    "overlapped",
    "host_s",
    "kv_tokens",
    "max_batch_tokens",
    "max_prefill_tokens",
    "max_rows",
    "block_size",
    "padding",
    "about",
)


def _system(content: Mapping[str, Any]) -> System:
    if content.get("format", FORMAT) != FORMAT:  # what else is in it is as that format has it
        raise ValueError(f"format {content['format']!r:.20}, this version reads {FORMAT}")
    reads = ("rho", "projects")  # of hidden caches: both or neither
    required = (*_FIELDS, *reads) if any(name in content for name in reads) else _FIELDS
    _only("", content, required=required)
    if not isinstance(content["name"], str):
        raise ValueError(f"name must be a text, got {content['name']!r:.40}")
    layers = _numbers(Coefficients, "seconds_per_layer", content["seconds_per_layer"])
    return System(
        content["name"],
        LinearCostModel(
            layers,
            _whole("num_layers", content["num_layers"]),
            _truth("overlapped", content["overlapped"]),
        ),
        content["kv_tokens"],
        content["max_batch_tokens"],
        content["max_prefill_tokens"],
        content["max_rows"],
        content["block_size"],
        padding=None if content["padding"] is None else _padding(content["padding"]),
        host=_numbers(HostOverhead, "host_s", content["host_s"]),
        about=dict(_object("about", content["about"])),
        rho=content.get("rho"),
        projects=_truth("projects", content.get("projects", False)),
    )


def _padding(value: Any) -> Padding:
    found = _object("padding", value)
    _only("padding.", found, required=("rows", "tokens", "decode_group", "decode_chunk"))
    sizes = {}
    for name in ("rows", "tokens"):
        if not isinstance(found[name], list):
            raise ValueError(f"padding.{name} must be a list, got {found[name]!r:.40}")
        sizes[name] = tuple(_whole(f"padding.{name}", size) for size in found[name])
    group, chunk = (_whole(f"padding.{n}", found[n]) for n in ("decode_group", "decode_chunk"))
    return Padding(**sizes, decode_group=group, decode_chunk=chunk)


_Terms = TypeVar("_Terms", Coefficients, HostOverhead)


def _numbers(kind: type[_Terms], name: str, value: Any) -> _Terms:
    """An object of numbers as a dataclass of them."""
    found, known = _object(name, value), fields(kind)
    required = tuple(one.name for one in known if one.default is MISSING)
    _only(f"{name}.", found, required, optional=tuple(one.name for one in known))
    return kind(**{key: _number(f"{name}.{key}", number) for key, number in found.items()})


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {value!r:.40}")
    return value


def _only(
    where: str, found: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    missing = [key for key in required if key not in found]
    if missing:
        raise ValueError(f"{where}{missing[0]} is missing")
    unknown = sorted(found.keys() - {*required, *optional})
    if unknown:
        raise ValueError(f"{where + unknown[0]!r:.60} is no field")


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.40}")
    return value


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise ValueError(f"{name} must be a whole number from 1 to {MOST}, got {value!r:.40}")
    return value


def _number(name: str, value: Any) -> float:
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong or not (math.isfinite(value) if isinstance(value, float) else abs(value) < 1e300):
        raise ValueError(f"{name} must be a number, got {value!r:.40}")
    return float(value)
