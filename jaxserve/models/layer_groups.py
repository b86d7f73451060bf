"""Which layers share block lists, so that layers with a sliding window give blocks behind it back,
and layers with a state have blocks for it."""

from __future__ import annotations

import dataclasses
from collections import deque

from jax.typing import DTypeLike

from jaxserve.models.base import ModelConfig
from jaxserve.sched.cache.block_sizes import blocks_for
from jaxserve.sched.cache.groups.groups import Groups
from jaxserve.sched.cache.groups.states import StateGroups
from jaxserve.sched.cache.groups.windows import WindowGroups


@dataclasses.dataclass(frozen=True)
class LayerGroups:
    """Layers in groups of the same size, each with block lists of its own. Hashable.

    Attributes:
        places: the group and the slot in it of each layer. Group 0 has the layers that keep all K
            and V.
        window: the longest window of the others; 0 if they have a state.
        state: blocks of a layer's state in a pool, see `for_pool`; 0 until that is known.
    """

    places: tuple[tuple[int, int], ...]
    window: int = 0
    state: int = 0

    @property
    def slots(self) -> int:
        """Slots of each group: the layers of the pool's array."""
        return max(slot for group, slot in self.places if not group) + 1

    @property
    def beside(self) -> Groups:
        """The other groups, as the scheduler sees them."""
        count = max(group for group, _ in self.places)
        return WindowGroups(self.window, count) if self.window else StateGroups(count, self.state)

    @property
    def planes(self) -> int:
        """Block tables of a request: of K and of V for each group with K and V."""
        return int(blocks_for(1, 1)) + (self.beside.planes if self.window else 0)

    @property
    def states(self) -> int:
        """Blocks of a request's states in all layers; 0 for none."""
        return 0 if self.window else self.beside.planes

    def for_pool(
        self, model: ModelConfig, heads: int, block_size: int, dtype: DTypeLike
    ) -> LayerGroups:
        """The groups in a pool.

        Args:
            model: the model.
            heads: KV heads of the pool.
            block_size: tokens of a block.
            dtype: of the pool.
        """
        if model.delta is None:
            return self
        blocks = model.delta.blocks(heads, block_size, model.head_dim, dtype)
        return dataclasses.replace(self, state=blocks)


def layer_groups(model: ModelConfig) -> LayerGroups | None:
    """The groups of a model: as many slots as layers that keep all K and V. None if all layers do,
    none does, or tokens see those behind them."""
    others = [kind.state or kind.sliding_window is not None for kind in model.layer_kinds]
    full = others.count(False)
    if not model.causal or full in (0, len(others)):
        return None
    whole = deque((0, slot) for slot in range(full))
    dealt = deque((1 + i // full, i % full) for i in range(len(others) - full))
    places = tuple((dealt if other else whole).popleft() for other in others)
    windows = [kind.sliding_window or 0 for kind in model.layer_kinds]
    return LayerGroups(places, max(windows))


def pool_layers(model: ModelConfig, groups: LayerGroups | None) -> int:
    """Layers of the pool's array."""
    return model.num_layers if groups is None else groups.slots


def groups_beside(groups: LayerGroups | None) -> Groups | None:
    """The groups beside the one with all K and V; None for none."""
    return None if groups is None else groups.beside
