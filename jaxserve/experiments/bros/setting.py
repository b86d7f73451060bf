"""BROS's setting (section 7.1), and what the parts of the page have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.experiments.bros.mixed import MixedCase, MixedResults
from jaxserve.experiments.common.claims import Section

MODELS = {
    "OPT-13B": "opt-13b@2xa100-40g",
    "OPT-30B": "opt-30b@4xa100-40g",
    "Llama-3-70B": "llama-3-70b@8xa100",
}
HIGHEST = {"OPT-13B": 10.0, "OPT-30B": 10.0, "Llama-3-70B": 15.0}  # requests/s
LABELS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
BROS, VLLM, RR = "bros", "vllm", "round_robin"
STATIC = ("priority", "edf")
POLICIES = (BROS, RR, VLLM, *STATIC)


@dataclass(frozen=True)
class Scale:
    """How much is run. seeds: traces of each point, by data set; duration: seconds of a trace;
    batch: of best-effort requests; batches: other sizes of them. steps: rates as shares of the
    HIGHEST; ages, floors: parameters of BROS."""

    seeds: tuple[int, ...] = (3, 1)
    duration: float = 600.0
    batch: int = 256
    batches: tuple[int, ...] = (64, 1024)
    models: tuple[str, ...] = tuple(MODELS)
    data_sets: tuple[str, ...] = tuple(LABELS)
    steps: tuple[float, ...] = (0.4, 0.7, 1.0)
    ages: tuple[float, ...] = (60.0, 15.0)
    floors: tuple[float, ...] = (50.0, 150.0)

    def rates(self, model: str) -> tuple[float, ...]:
        """Requests/s, ascending."""
        return tuple(round(step * HIGHEST[model], 2) for step in self.steps)


QUICK = Scale((2,), 4.0, 4, (8,), ("OPT-13B",), ("sharegpt",), (1.0,), (2.0,), (50.0,))


class Part(ABC):
    """One section of the page."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    @abstractmethod
    def cases(self) -> Iterator[MixedCase]:
        """What it wants to know. Equal ones are run once."""

    @abstractmethod
    def section(self, results: MixedResults, figures: Path) -> Section:
        """Of the page; its charts are written into the folder `figures`. KeyError if `results`
        lacks one of `cases`."""

    def points(self) -> Iterator[tuple[str, str, float]]:
        """Model, data set and rate of each point, panel by panel."""
        for data in self.scale.data_sets:
            for model in self.scale.models:
                for rate in self.scale.rates(model):
                    yield model, data, rate

    def seeds(
        self,
        policy: str,
        model: str,
        data: str,
        rate: float,
        switches: tuple[tuple[str, float | bool], ...] = (),
    ) -> list[MixedCase]:
        """One a seed. Plans are timed where Figure 14 has them."""
        scale = self.scale
        timed = data == "sharegpt" and model.startswith("OPT") and not switches
        return [
            MixedCase(
                policy,
                MODELS[model],
                data,
                rate,
                seed,
                scale.duration,
                scale.batch,
                switches,
                timed,
            )
            for seed in range(scale.seeds[scale.data_sets.index(data)])
        ]
