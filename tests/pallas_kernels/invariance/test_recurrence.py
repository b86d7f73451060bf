"""States in the pool: what is read from them, and that they survive any pool and any cut."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import (
    DeltaInput,
    DeltaNet,
    Pool,
    StateRows,
    make_pool,
    recur,
    reference,
)

HEADS, SIZE, DIM, LAYERS, ROWS = 2, 4, 8, 2, 3
NET = DeltaNet(key_heads=4, value_heads=8, key_dim=12, value_dim=10, taps=4)
BACKENDS, DTYPES = ("xla", "numba"), ("float32", "bfloat16", "float8_e4m3fn", "int8")


def random_input(tokens: int, net: DeltaNet = NET) -> DeltaInput:
    draw = np.random.default_rng(3).standard_normal
    heads, per = net.key_heads, net.per_key
    shapes = (
        (tokens, heads, net.channels),
        (tokens, heads, 2 * per),
        (heads, net.channels, net.taps),
    )
    arrays = [jnp.asarray(draw(shape), jnp.float32) for shape in (*shapes, *[(heads, per)] * 2)]
    return DeltaInput(*arrays, net)


class Rows:
    """Rows whose states are read from blocks and written to others, which change places."""

    def __init__(self, backend: str, dtype: str, net: DeltaNet = NET) -> None:
        self.net = net
        self.each = net.blocks(HEADS, SIZE, DIM, dtype)
        ids = np.random.default_rng(1).permutation(2 * ROWS * self.each + 5).astype(np.int32)
        self.tables = ids[: 2 * ROWS * self.each].reshape(ROWS, 2, self.each)
        self.pool: Pool = make_pool(LAYERS, len(ids), HEADS, SIZE, DIM, dtype)
        self.done = np.zeros(ROWS, np.int32)
        self.run = jax.jit(partial(recur, backend=backend), donate_argnums=0)

    def step(
        self, text: DeltaInput, counts: dict[int, int], tokens: int, *, decode_only: bool = False
    ) -> dict[int, np.ndarray]:
        """What each row reads behind its next tokens, all of the same text."""
        rows, many = list(counts), np.array([*counts.values(), *[0] * (ROWS - len(counts))])
        start = np.cumsum(many) - many
        owner = np.full(tokens, ROWS, np.int32)
        owner[: many.sum()] = np.repeat(np.arange(ROWS), many)
        at = [self.done[row] + np.arange(count) for row, count in counts.items()]
        at = np.concatenate([*at, np.zeros(tokens - many.sum(), np.int64)]).astype(np.int64)
        before = np.concatenate([self.done[rows], np.zeros(ROWS - len(rows), np.int32)])
        order = [*rows, *(row for row in range(ROWS) if row not in counts)]
        length = tokens if decode_only else ROWS
        of = StateRows(
            jnp.asarray(self.tables[order][:length]),
            *(jnp.asarray(part[:length], jnp.int32) for part in (before + many, start, many)),
            jnp.asarray(owner),
            decode_only=decode_only,
        )
        given = (text.mixed[at], text.gates[at], text.conv, text.rate, text.shift)
        self.pool, out = self.run(self.pool, np.int32(1), DeltaInput(*given, self.net), of)
        for row, count in counts.items():
            self.done[row] += count
            self.tables[row] = self.tables[row, ::-1]
        return {r: np.asarray(out)[s : s + counts[r]] for r, s in zip(rows, start, strict=False)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_cut_in_any_way(backend: str, dtype: str) -> None:
    text = random_input(12)
    wanted = reference.recur(text)
    run, read = Rows(backend, dtype), [[], [], []]  # type: ignore[var-annotated]
    for counts, tokens in (
        ({0: 1, 2: 5}, 8),
        ({2: 1, 0: 1, 1: 4}, 8),
        ({0: 8}, 8),
        ({0: 1, 1: 1, 2: 1}, 3),
        ({1: 7, 0: 1}, 8),
        ({2: 5}, 8),
    ):
        alone = set(counts.values()) == {1}
        for row, out in run.step(text, counts, tokens, decode_only=alone).items():
            read[row].append(out)
    for row in range(ROWS):
        np.testing.assert_allclose(np.concatenate(read[row]), wanted, atol=2e-6)
    if backend == "numba":  # the same bits, too
        assert len({np.concatenate(read[row]).tobytes() for row in range(ROWS)}) == 1


def test_a_convolution_of_one_tap() -> None:
    net = DeltaNet(key_heads=2, value_heads=2, key_dim=3, value_dim=5, taps=1)
    text = random_input(6, net)
    for backend in BACKENDS:
        run = Rows(backend, "float32", net)
        out = [run.step(text, {0: 3}, 3)[0], run.step(text, {0: 3}, 3)[0]]
        np.testing.assert_allclose(np.concatenate(out), reference.recur(text), atol=2e-6)


def test_heads_that_the_pool_does_not_divide() -> None:
    net = DeltaNet(key_heads=3, value_heads=3, key_dim=3, value_dim=5, taps=2)
    with pytest.raises(ValueError, match="2 KV heads do not divide 3 key heads"):
        Rows("xla", "float32", net).step(random_input(2, net), {0: 2}, 2)
