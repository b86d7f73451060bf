"""What a step tells the attention kernels about its rows and tokens."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

# Cache kinds (the scheduler's CacheKind has the same values).
KV = 0
HIDDEN = 1

# Filling directions of a request in its blocks (BROS section 5.1).
LEFT = 0
RIGHT = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionBatch:
    """One step's rows (requests) and tokens, padded to a static bucket of R rows and T tokens.

    The position of a row's i-th token of the step is context_lens - query_lens + i. A row's tokens
    are consecutive; rows do not overlap.

    Attributes:
        tables: int32 [R, 2, W], block ids: K (or hidden) blocks in [:, 0], V blocks in [:, 1].
            Entries past a row's last block, and [:, 1] of hidden rows, are never used and may be
            any id in [0, blocks).
        context_lens: int32 [R], tokens in the cache once this step's are written; 0: padding row.
        query_start: int32 [R], index of the row's first token on the flat token axis.
        query_lens: int32 [R], the row's tokens in this step; 0: padding row.
        direction: int32 [R]. LEFT: token t of a block is in slot t; RIGHT: in slot block_size - 1 -
            t.
        kind: int32 [R], KV or HIDDEN: the kind of the row's cache. Padding rows: KV.
        token_row: int32 [T], the row of each token; R for padding tokens.
        num_decodes: int32 [], rows [0, num_decodes) have one token each; the rest are prefill
            chunks.
        num_rows: int32 [], rows in use: [0, num_rows).
        drafts: Whether many chunks may be decodes with a few drafted tokens. Static: other steps
            leave out the kernels for these.
    """

    tables: jax.Array
    context_lens: jax.Array
    query_start: jax.Array
    query_lens: jax.Array
    direction: jax.Array
    kind: jax.Array
    token_row: jax.Array
    num_decodes: jax.Array
    num_rows: jax.Array
    drafts: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def max_rows(self) -> int:
        """R, the rows of the bucket, including padding."""
        return self.context_lens.shape[0]

    @property
    def max_tokens(self) -> int:
        """T, the tokens of the bucket, including padding."""
        return self.token_row.shape[0]

    @property
    def table_width(self) -> int:
        """W, the most blocks of one kind that a row can have."""
        return self.tables.shape[2]

    def decodes(self, rows: int | None = None) -> AttentionBatch:
        """The decodes among the first `rows` rows (None: all) as a batch of their own.

        Token i is row i's, so T == R. It is the token at query_start[i] of this batch. Other rows
        become padding.
        """
        rows = self.max_rows if rows is None else rows
        index = jnp.arange(rows, dtype=jnp.int32)
        mine = index < self.num_decodes
        number = jnp.minimum(self.num_decodes, rows)
        return AttentionBatch(
            tables=self.tables[:rows],
            context_lens=jnp.where(mine, self.context_lens[:rows], 0),
            query_start=index,
            query_lens=mine.astype(jnp.int32),
            direction=self.direction[:rows],
            kind=jnp.where(mine, self.kind[:rows], KV),
            token_row=jnp.where(mine, index, rows),
            num_decodes=number,
            num_rows=number,
        )

    def validate(self) -> None:
        """Raises ValueError, which names the field, if a shape or dtype is wrong. Costs nothing at
        run time: shapes are static."""
        if self.tables.ndim != 3 or self.tables.shape[1] != 2:
            raise ValueError(f"batch.tables: want [R, 2, W], got {self.tables.shape}")
        if self.token_row.ndim != 1:
            raise ValueError(f"batch.token_row: want [T], got {self.token_row.shape}")
        rows = self.tables.shape[0]
        for name in ("context_lens", "query_start", "query_lens", "direction", "kind"):
            shape = getattr(self, name).shape
            if shape != (rows,):
                raise ValueError(f"batch.{name}: want [{rows}] as tables has rows, got {shape}")
        for name in ("num_decodes", "num_rows"):
            shape = getattr(self, name).shape
            if shape != ():
                raise ValueError(f"batch.{name}: want a scalar, got {shape}")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, bool) and value.dtype != jnp.int32:
                raise ValueError(f"batch.{item.name}: want int32, got {value.dtype}")
