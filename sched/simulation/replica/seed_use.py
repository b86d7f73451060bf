"""Whether a policy drew lots: whether another seed could have changed what it did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxserve.sched.policy import View


class SeedWatch(View):
    """A view that knows whether its policy asked for the seed."""

    seed_read = False

    @property
    def seed(self) -> int:
        """The view's seed; asking for it is noted."""
        vars(self)["seed_read"] = True
        return int(vars(self)["seed"])

    @seed.setter
    def seed(self, value: int) -> None:  # by the dataclass's own __init__
        vars(self)["seed"] = value

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Where it is not the policy that asks."""
        before = self.seed_read
        yield
        vars(self)["seed_read"] = before

    @classmethod
    def from_view(cls, view: View) -> SeedWatch:
        """The same view, watched."""
        return cls(**vars(view))
