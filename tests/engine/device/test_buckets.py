"""Every batch within the limits has a bucket, and there are few of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import ConfigError
from jaxserve.engine.device.buckets import ALWAYS, ASKED, NEVER, make_buckets
from jaxserve.sched.cache.cache_kinds import CacheKind
from jaxserve.sched.cost.cost_model import BatchFeatures


@given(max_rows=st.integers(1, 300), max_tokens=st.integers(1, 4096), data=st.data())
def test_every_batch_fits(max_rows: int, max_tokens: int, data: st.DataObject) -> None:
    buckets = make_buckets(max_rows, max_tokens, width=4)
    rows = data.draw(st.integers(1, max_rows))
    tokens = data.draw(st.integers(rows, max(rows, max_tokens)))
    decode = buckets.decode(rows)
    assert decode.tokens == decode.rows >= rows
    if tokens <= max_tokens:
        mixed = buckets.mixed(tokens)
        assert mixed.tokens >= tokens and mixed.rows >= rows
        assert mixed in buckets.all()
    assert decode in buckets.all()
    assert len(buckets.all()) == len(buckets.rows) + len(buckets.tokens)


@given(columns=st.integers(0, 256))
def test_adapters_have_steps_of_their_own(columns: int) -> None:
    """Of the fewest columns that will do; rows without any have those that they had."""
    buckets = make_buckets(8, 64, width=4, lora=(64, 256))
    layout = buckets.fitting(np.ones(3, np.int64), np.zeros(3), columns=columns)
    assert layout in buckets.all()
    assert layout.lora == (0 if not columns else 64 if columns <= 64 else 256)
    assert len(buckets.all()) == 3 * len(make_buckets(8, 64, width=4).all())


def test_padding_is_bounded() -> None:
    """Above 256 tokens a step pads at most 255; below, less than its own size."""
    buckets = make_buckets(8, 2048, width=4)
    for tokens in range(1, 2049):
        padding = buckets.mixed(tokens).tokens - tokens
        assert padding < max(16, min(tokens, 256))


def test_given_sizes_are_checked_and_trimmed() -> None:
    assert make_buckets(8, 64, width=4, rows=(2, 8, 32)).rows == (2, 8)
    for rows, problem in (((4, 2, 8), "ascending"), ((0, 8), "positive"), ((2, 4), "reach 8")):
        with pytest.raises(ConfigError, match=rf"engine\.row_buckets .*{problem}"):
            make_buckets(8, 64, width=4, rows=rows)


@given(max_rows=st.integers(1, 300), max_tokens=st.integers(1, 4096), data=st.data())
def test_a_batch_with_hidden_rows_is_padded_as_its_cost_is_predicted(
    max_rows: int, max_tokens: int, data: st.DataObject
) -> None:
    buckets = make_buckets(max_rows, max_tokens, width=4, hidden=True)
    count = data.draw(st.integers(1, min(max_rows, max_tokens)))
    counts = np.ones(count, np.int64)
    counts[0] = data.draw(st.integers(1, max_tokens - count + 1))
    some = np.arange(count) == data.draw(st.integers(0, count - 1))
    for hidden in (some, some & False):
        layout = buckets.fitting(counts, np.where(hidden, CacheKind.HIDDEN, CacheKind.KV))
        assert layout in buckets.all() and bool(layout.hidden) == hidden.any()
        contexts = np.where(hidden | (counts == 1), 3, 0)
        features = BatchFeatures.from_rows(
            counts, contexts, counts == 1, padding=buckets.padding, hidden=hidden
        )
        assert layout.tokens == features.padded_tokens
        assert features.padded(buckets.padding).padded_tokens == layout.tokens


@given(rows=st.integers(1, 300), data=st.data())
def test_decodes_with_hidden_caches_have_room_at_the_front(rows: int, data: st.DataObject) -> None:
    """And no more than an eighth of the rows where that does; K and V only where somebody has
    them."""
    buckets = make_buckets(300, 300, width=4, hidden=True)
    hidden = data.draw(st.integers(0, rows))
    layout = buckets.decode(rows, hidden=hidden)
    assert layout in buckets.all()
    assert layout.hidden >= hidden and bool(layout.hidden) == bool(hidden)
    assert layout.kv == (hidden < rows)
    if layout.kv and hidden and layout.rows >= 16 and hidden <= layout.rows // 8:
        assert layout.hidden == layout.rows // 8


def test_hidden_caches_add_few_steps() -> None:
    """Those that are not decodes take long to compile: there are no more of them than without."""
    plain, both = (make_buckets(16, 512, width=4, hidden=hidden) for hidden in (False, True))
    more = [layout for layout in both.all() if layout not in plain.all()]
    decodes = [(layout.rows, layout.hidden, layout.kv) for layout in more if layout.decode_only]
    beside_kv = [(2, 2, True), (4, 4, True), (8, 8, True), (16, 2, True), (16, 16, True)]
    assert sorted(decodes) == sorted([*beside_kv, *((n, n, False) for n in (1, 2, 4, 8, 16))])
    others = [(layout.tokens, layout.hidden) for layout in more if not layout.decode_only]
    assert sorted(others) == [(n, room) for n in (32, 128, 512) for room in (2, 16)]
    assert set(plain.all()) < set(both.all())
    assert len(both.all()) == len(set(both.all()))


@given(rows=st.integers(1, 40), data=st.data())
def test_where_none_are_fitted_each_size_is_there_once_more(rows: int, data: st.DataObject) -> None:
    plain, both = (make_buckets(40, 512, width=4, hidden=n, fitted=False) for n in (False, True))
    layout = both.decode(rows, hidden=data.draw(st.integers(1, rows)))
    assert layout in both.all() and layout.hidden == layout.rows and layout.kv
    assert len(both.all()) == len(set(both.all()))
    decodes = [layout for layout in both.all() if layout.decode_only]
    assert len(decodes) == 2 * len(plain.rows)


def test_a_hidden_chunk_alone_wants_a_step_that_knows_of_them() -> None:
    buckets = make_buckets(16, 512, width=4, hidden=True)
    kinds = np.array([CacheKind.KV, CacheKind.HIDDEN])
    assert buckets.fitting(np.array([1, 40]), kinds) == buckets.mixed(41, hidden=1)
    assert buckets.mixed(41, hidden=1).hidden == 2


@given(counts=st.lists(st.integers(1, 20), min_size=1, max_size=8), data=st.data())
def test_a_deterministic_engine_has_a_single_step(counts: list[int], data: st.DataObject) -> None:
    """And one that is asked has it beside the others, which are what they were."""
    sizes: dict[str, Any] = {"width": 4, "lora": (64, 256), "drafts": data.draw(st.booleans())}
    always, asked, never = (
        make_buckets(8, 256, **sizes, deterministic=each) for each in (ALWAYS, ASKED, NEVER)
    )
    options = {"mixed": data.draw(st.booleans()), "columns": data.draw(st.integers(0, 256))}
    given = np.array(counts), np.zeros(len(counts))
    (only,) = always.all()
    assert always.fitting(*given, **options) == only == always.sampled()[0]
    assert asked.fitting(*given, **options, deterministic=True) == only
    assert asked.fitting(*given, **options) == never.fitting(*given, **options)
    assert asked.all() == [*never.all(), only]
    assert never.fitting(*given, **options, deterministic=True) in never.all()


@given(
    max_rows=st.integers(1, 300),
    max_tokens=st.integers(1, 4096),
    hidden=st.booleans(),
    more=st.sampled_from([{}, {"lora": (64, 256)}, {"drafts": True}, {"deterministic": ASKED}]),
)
def test_stages_grow_to_all_layouts(
    max_rows: int, max_tokens: int, hidden: bool, more: dict[str, Any]
) -> None:
    """By layouts that are among the others in the end; any batch fits into the first."""
    if hidden and more:
        more = {}
    buckets = make_buckets(max_rows, max_tokens, width=4, hidden=hidden, **more)
    stages = buckets.stages()
    assert stages[-1] == buckets
    before: set[Any] = set()
    for stage in stages:
        layouts = set(stage.all())
        assert before < layouts <= set(buckets.all())
        assert stage.padding.rows[-1] == buckets.rows[-1]
        assert stage.padding.tokens[-1] == buckets.tokens[-1]
        assert not hidden or stage.projection_layout() == buckets.projection_layout()
        assert {layout.rows for layout in layouts} == {layout.rows for layout in stage.sampled()}
        before = layouts
    assert len(stages[0].all()) <= len(buckets.all())
    few = {} if hidden else {buckets.rows[0], buckets.rows[-1]}
    assert not few or set(stages[0].rows) == few
    assert make_buckets(8, 64, width=4, deterministic=ALWAYS).stages()[1:] == []
