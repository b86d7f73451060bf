"""Every backend's writes and attention against the float64 references, over drawn batches and those
at the edges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import given, settings

from jaxserve.pallas_kernels import HIDDEN, KV, LEFT, RIGHT, AttentionBatch
from jaxserve.pallas_kernels.pool import ScaledPool
from tests.pallas_kernels.batches import make_batch, steps
from tests.pallas_kernels.cases import BACKENDS, Case, on_backends
from tests.pallas_kernels.conformance import ATTENTION, WRITES, Attention, Check, call, check_write
from tests.pallas_kernels.edges import Edge, edges_of


def attentions(only: Iterable[str] | None = None) -> list[ParameterSet]:
    """Parameters (attention, backend, case) of all attention functions, or with `only` these
    cases."""
    return [
        pytest.param(attention, *found.values, id=f"{attention.name}-{found.id}", marks=found.marks)
        for attention in ATTENTION
        for found in on_backends(only or attention.cases, attention.purpose, attention.kind)
    ]


def at_edges(found: list[ParameterSet]) -> list[ParameterSet]:
    """The same, each with the edges of its case; of what is interpreted, which takes long, every
    edge with one of the cases that it is of, in turn, none of them slow."""
    having: dict[tuple[Any, ...], list[ParameterSet]] = {}
    for one in found:
        *of, case = one.values
        if one.marks and of[-1].endswith("interpret"):
            continue
        for edge in edges_of(case):
            having.setdefault((*of, edge), []).append(one)
    return [
        pytest.param(*one.values, edge, id=f"{one.id}-{edge.__name__}", marks=one.marks)
        for turn, ((*of, edge), ones) in enumerate(having.items())
        for one in ([ones[turn % len(ones)]] if of[-1].endswith("interpret") else ones)
    ]


def over_drawn(check: Check, backend: str, case: Case, kind: int) -> None:
    """The check over as many drawn batches as the backend has time for."""

    @settings(max_examples=BACKENDS[backend])
    @given(step=steps(case.shape, kind))
    def run(step: tuple[AttentionBatch, int]) -> None:
        check(backend, case, *step)

    run()


@pytest.mark.parametrize(("backend", "case"), on_backends(WRITES, "write"))
def test_write(backend: str, case: Case) -> None:
    over_drawn(check_write, backend, case, HIDDEN)


@pytest.mark.parametrize(("backend", "case"), on_backends(["mixed"], "write"))
def test_write_where_no_row_can_be_hidden(backend: str, case: Case) -> None:
    rows = [(9, 1), (case.shape.longest, 20), (17, 17)]
    batch = make_batch(case.shape, rows, [LEFT, RIGHT, LEFT], 1, np.random.default_rng(0))
    check_write(backend, case, batch, 0, with_x=False)


@pytest.mark.parametrize(("backend", "case", "edge"), at_edges(on_backends(WRITES, "write")))
def test_write_at_edges(backend: str, case: Case, edge: Edge) -> None:
    check_write(backend, case, edge(case.shape, KV), 1)


@pytest.mark.parametrize(("attention", "backend", "case"), attentions())
def test_attention(attention: Attention, backend: str, case: Case) -> None:
    over_drawn(attention.check, backend, case, attention.kind)


@pytest.mark.parametrize(("attention", "backend", "case", "edge"), at_edges(attentions()))
def test_attention_at_edges(attention: Attention, backend: str, case: Case, edge: Edge) -> None:
    attention.check(backend, case, edge(case.shape, attention.kind), 1)


@pytest.mark.parametrize(("attention", "backend", "case"), attentions(["decodes", "int8"]))
def test_a_row_cannot_see_anothers_blocks(attention: Attention, backend: str, case: Case) -> None:
    """With NaN for all that row 1 has cached, row 0's result is bit for bit what it was."""
    rng, shape = np.random.default_rng(5), case.shape
    rows, kinds = [(20, 1), (41, 1)], [attention.kind] * 2
    batch = make_batch(shape, rows, [LEFT, RIGHT], 2, rng, kinds=kinds)
    queries, pool, *rest = attention.arguments(case, batch, 5)
    before = np.asarray(call(attention, backend, case, queries, pool, *rest))
    telling = pool.scales if isinstance(pool, ScaledPool) else pool
    telling[:, np.asarray(batch.tables)[1].ravel()] = np.nan
    after = np.asarray(call(attention, backend, case, queries, pool, *rest))
    assert np.array_equal(before[0], after[0])
    assert np.isfinite(before[1]).all() and np.isnan(after[1]).all()
