"""A booked step: the plan, and what the scheduler derived from it when booking.

The executor, the simulator, metrics and tests read these values and do not derive them again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.padding import Padding
from jaxserve.sched.plan import BatchPlan


@dataclass(frozen=True)
class ProjectSlots:
    """Hidden caches to project to K and V in place.

    Attributes:
        rows: int64 [k].
        cached: int64 [k], cached tokens of each row.
        tables: int32 [k, 2, width], their block tables.
        directions: int8 [k], their `Direction`.
    """

    rows: np.ndarray
    cached: np.ndarray
    tables: np.ndarray
    directions: np.ndarray


@dataclass(frozen=True)
class CopySlots:
    """Slots to copy within the pool, in all layers.

    Attributes:
        places: int32 [m, 4], (source block, slot, target block, slot).
    """

    places: np.ndarray


@dataclass(frozen=True)
class Save:
    """Slots to copy to host memory. The first counts[0] slots are stored under keys[0], and so on.

    Attributes:
        keys: One per segment, see `sched.cache.kv_offload`.
        counts: Slots of each segment.
        slots: int32 [sum of counts, 2], (block, slot).
    """

    keys: tuple[int, ...]
    counts: tuple[int, ...]
    slots: np.ndarray


@dataclass(frozen=True)
class Load:
    """Slots to copy back from host memory. keys[0] fills the first counts[0] slots, and so on.

    Attributes:
        keys: One per segment, see `sched.cache.kv_offload`.
        counts: Slots of each segment.
        slots: int32 [sum of counts, 2], (block, slot).
    """

    keys: tuple[int, ...]
    counts: tuple[int, ...]
    slots: np.ndarray


@dataclass(frozen=True)
class Discard:
    """Segments in host memory that may be freed."""

    keys: tuple[int, ...]


Move = ProjectSlots | CopySlots | Save | Load | Discard


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has been booked. Arrays are parallel to plan.rows, [n].

    Attributes:
        plan: The policy's plan.
        start, end: Cached tokens of each row before and after, as if no draft were right.
        emits: bool, which rows sample a token.
        decodes: bool, which rows compute only the newest generated token and drafts after it.
        feeds_back: bool, rows whose last token is the newest generated one, which may be only on
        the device.
        generated: int64, tokens generated, including those that the step samples.
        hidden: bool, which rows have hidden caches; None if none has.
        moves: Operations on the device before it, in order.
        preempted: Rows that lost all their cache.
        sampling: Whether any row that samples does so non-greedily.
        adapted: Whether any row has an adapter.
        num_recomputed_tokens: Tokens that had been in the cache before it was lost.
        given_up: Rows, in the batch or not, that will miss their targets, known since this plan.
    """

    plan: BatchPlan
    start: np.ndarray
    end: np.ndarray
    emits: np.ndarray
    decodes: np.ndarray
    feeds_back: np.ndarray
    generated: np.ndarray
    hidden: np.ndarray | None
    moves: tuple[Move, ...]
    preempted: np.ndarray
    sampling: bool = False
    adapted: bool = False
    num_recomputed_tokens: int = 0
    given_up: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.plan.rows)

    @property
    def rows(self) -> np.ndarray:
        """Table rows, int64 [n]."""
        return self.plan.rows

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch: of decodes, prefills and recomputation."""
        return int(np.add.reduce(self.plan.num_tokens))

    @property
    def num_decode_tokens(self) -> int:
        """The newest generated tokens, including those at the end of a refill."""
        return int(np.count_nonzero(self.feeds_back))

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that are computed for the first time."""
        others = self.num_decode_tokens + self.num_recomputed_tokens + self.num_draft_tokens
        return self.num_tokens - others

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens, right or not."""
        drafts = self.plan.drafts
        return 0 if drafts is None else int(np.add.reduce(drafts))

    @property
    def known(self) -> np.ndarray:
        """Tokens of each row that are not drafts, int64 [n]."""
        drafts = self.plan.drafts
        return self.plan.num_tokens if drafts is None else self.plan.num_tokens - drafts

    @property
    def num_decodes(self) -> int:
        """Rows that decode."""
        return int(np.count_nonzero(self.decodes))

    @property
    def emitting(self) -> np.ndarray:
        """Rows that sample a token."""
        return self.plan.rows[self.emits]

    def features(self, padding: Padding | None = None) -> BatchFeatures:
        """Features for its cost, including moves. padding: the shapes that the engine rounds
        batches to."""
        return BatchFeatures.from_rows(
            self.plan.num_tokens,
            self.start,
            self.decodes,
            padding=padding,
            hidden=self.hidden,
            sampling=self.sampling,
            adapted=self.adapted,
            **(_moved(self.moves) if self.moves else {}),
        )


def _moved(moves: tuple[Move, ...]) -> dict[str, int]:
    """The moves' contributions to the features, by name."""
    found = Counter[str]()
    for move in moves:
        if isinstance(move, ProjectSlots):
            found["projected_tokens"] += int(move.cached.sum())
        elif isinstance(move, CopySlots):
            found["copied_slots"] += len(move.places)
        elif isinstance(move, Save):
            found["saved_slots"] += len(move.slots)
        elif isinstance(move, Load):
            found["loaded_slots"] += len(move.slots)
    return found
