"""Which layers share block lists, so that layers with a sliding window give blocks behind it
back."""

from __future__ import annotations

import dataclasses
from collections import deque

from jaxserve.models.base import ModelConfig
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.window_groups import WindowGroups


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """Layers in groups of the same size, each with block lists of its own. Hashable.

    Attributes:
        places: the group and the slot in it of each layer. Group 0 has the layers without a window.
        window: the longest window of the others.
    """

    places: tuple[tuple[int, int], ...]
    window: int

    @property
    def slots(self) -> int:
        """Slots of each group: the layers of the pool's array."""
        return max(slot for group, slot in self.places if not group) + 1

    @property
    def windows(self) -> WindowGroups:
        """The groups with a window, as the scheduler sees them."""
        return WindowGroups(self.window, max(group for group, _ in self.places))

    @property
    def planes(self) -> int:
        """Block tables of a request: of K and of V for each group."""
        return int(blocks_for(1, 1)) + self.windows.planes


def layer_groups(model: ModelConfig) -> LayerGroups | None:
    """The groups of a model: as many slots as layers without a window. None if all layers have one,
    or none has, or tokens see those behind them."""
    windows = [kind.sliding_window for kind in model.layer_kinds]
    full = windows.count(None)
    if not model.causal or full in (0, len(windows)):
        return None
    whole = deque((0, slot) for slot in range(full))
    others = deque((1 + i // full, i % full) for i in range(len(windows) - full))
    places = tuple((whole if window is None else others).popleft() for window in windows)
    return LayerGroups(places, max(window for window in windows if window is not None))


def pool_layers(model: ModelConfig, groups: LayerGroups | None) -> int:
    """Layers of the pool's array."""
    return model.num_layers if groups is None else groups.slots


def windows_of(groups: LayerGroups | None) -> WindowGroups | None:
    """The groups with a window; None for none."""
    return None if groups is None else groups.windows
