"""Which drafted tokens are right: those that equal the tokens sampled before them.

A step with drafts has logits of several tokens of a row: of its newest token and of the drafts
after it. A token is sampled after each, with the noise of its own position in the output. Sampled
tokens are accepted as long as each draft equals the token sampled before it; the first one that
differs replaces its draft. So the text is the same as without drafts, whether it is greedy or drawn
(Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023, section
2, where the draft has probability 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sched.speculation.choice import MOST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Checked:
    """The P tokens of a step whose logits are wanted, those of a row next to each other.

    Attributes:
        follows: bool [P], whether a token is a draft, so that the one before is of the same row.
        inputs: int32 [P], the tokens themselves.
    """

    follows: jax.Array
    inputs: jax.Array

    @property
    def depth(self) -> jax.Array:
        """Number of drafts of its row up to each token, int32 [P]."""
        at = jnp.arange(len(self.follows), dtype=jnp.int32)
        return at - lax.cummax(jnp.where(self.follows, 0, at))

    def drafts(self, padding: int) -> jax.Array:
        """The drafts up to and including each token, int32 [P, MOST], with `padding` if there are
        fewer."""
        places = jnp.arange(len(self.follows), dtype=jnp.int32)[:, None] - jnp.arange(MOST)
        there = jnp.arange(MOST) < self.depth[:, None]
        return jnp.where(there, self.inputs[jnp.maximum(places, 0)], padding)

    def stand(self, tokens: jax.Array) -> Standing:
        """Which of the tokens sampled after each, int32 [P], are accepted."""
        before = jnp.roll(tokens, 1)
        wrong = jnp.cumsum(self.follows & (self.inputs != before))
        depth = self.depth
        stands = wrong == wrong[jnp.arange(len(depth)) - depth]
        goes_on = jnp.roll(self.follows & stands, -1).at[-1].set(False)
        return Standing(stands, stands & ~goes_on, depth)


class Standing(NamedTuple):
    """Attributes:
    stands: bool [P], which of the sampled tokens are part of the output.
    last: bool [P], which are the last of their row.
    depth: int32 [P], number of tokens of the row before each.
    """

    stands: jax.Array
    last: jax.Array
    depth: jax.Array


def checked_tokens(fields: dict[str, jax.Array], tokens: jax.Array) -> Checked:
    """The checked tokens of a batch from `Layout.unpack`. tokens: int32 [T], the step's input."""
    at = fields["last"]
    row = fields["token_row"][at]
    same = (row == jnp.roll(row, 1)).at[0].set(False)
    return Checked(same & (fields["emit"] != 0), tokens[at])


def slots_of(fields: dict[str, jax.Array]) -> jax.Array:
    """The device slot of each token whose logits are wanted, int32 [P]."""
    row = jnp.minimum(fields["token_row"][fields["last"]], len(fields["slots"]) - 1)
    return jnp.asarray(fields["slots"][row])
