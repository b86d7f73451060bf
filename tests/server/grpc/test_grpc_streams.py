"""The way from the engine's thread to a call, without gRPC."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.output import FinishReason, Output, TokenLogprobs
from jaxserve.server.requests.output_streams import (
    MAX_DELTA_BYTES,
    Delta,
    DuplicateRequest,
    OutputRouter,
    RequestFailed,
    SlowReader,
    Stream,
    StreamFailed,
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=60))
def test_nothing_is_lost_or_reordered_however_late_the_reader_comes(
    news: list[tuple[int, int, bool]],
) -> None:
    """news: (continuation, tokens at once, whether the reader takes one message after it)."""

    async def play() -> tuple[dict[int, list[int]], dict[int, list], dict[int, list], list[Delta]]:
        stream, sent, got = Stream("r", 3), {0: [], 1: [], 2: []}, []
        logged: dict[int, list[TokenLogprobs]] = {0: [], 1: [], 2: []}
        told: dict[int, list[TokenLogprobs]] = {0: [], 1: [], 2: []}
        for count, (index, tokens, reads) in enumerate(news):
            ids = tuple(range(100 * count, 100 * count + tokens))
            top = [tuple((token + i, -0.1 * i) for i in range(tokens)) for token in ids]
            logprobs = tuple(
                TokenLogprobs(token, -1.0, pairs) for token, pairs in zip(ids, top, strict=True)
            )
            logged[index].extend(logprobs)
            text = "".join(f"<{token}>" for token in ids)
            stream.push(Output("r", index, ids, text, logprobs))
            stream.push(Output("r", index, prompt_logprobs=logprobs[:2]))
            told[index].extend(logprobs[:2])
            sent[index].extend(ids)
            if reads:
                got.append(await stream.next())
        for index in range(3):
            stream.push(Output("r", index, finish_reason=FinishReason.STOP))
        while (delta := await stream.next()) is not None:
            got.append(delta)
        assert stream.finished
        return sent, logged, told, got

    sent, logged, told, got = asyncio.run(play())
    for index, ids in sent.items():
        mine = [delta for delta in got if delta.index == index]
        assert [token for delta in mine for token in delta.token_ids] == ids
        assert "".join(t for d in mine for t in d.text) == "".join(f"<{i}>" for i in ids)
        assert [entry for delta in mine for entry in delta.logprobs] == logged[index]
        assert [entry for delta in mine for entry in delta.prompt_logprobs] == told[index]
        assert [delta.last is not None for delta in mine] == [False] * (len(mine) - 1) + [True]


def test_what_is_pending_is_one_message_up_to_a_limit() -> None:
    third = "x" * (MAX_DELTA_BYTES // 3)

    async def play() -> list[int]:
        stream = Stream("r", 1)
        for token in range(5):
            stream.push(Output("r", 0, (token,), third))
        stream.push(Output("r", 0, finish_reason=FinishReason.STOP))
        sizes = []
        while (delta := await stream.next()) is not None:
            sizes.append(len(delta.token_ids))
        return sizes

    assert asyncio.run(play()) == [3, 2]


def test_what_waits_for_a_reader_is_bounded_and_ends_the_request() -> None:
    top = tuple((token, -0.5) for token in range(20))
    cancelled = []

    def output(token: int) -> Output:
        return Output("r", 0, (token,), "x", (TokenLogprobs(token, -0.5, top),))

    async def play() -> None:
        router = OutputRouter(
            asyncio.get_running_loop(), buffer_bytes=256 << 10, cancel=cancelled.append
        )
        stream = router.open_stream("r", 1)
        tracemalloc.start()
        for token in range(20_000):
            stream.push(output(token))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 512 << 10
        assert cancelled == ["r"]
        with pytest.raises(SlowReader, match=r"server\.stream_buffer_kib"):
            await stream.next()
        router.on_output(Output("r", 0, finish_reason=FinishReason.CANCELLED))
        await asyncio.sleep(0)
        assert router.unfinished() == []
        whole = router.open_stream("s", 1, bounded=False)
        for token in range(20_000):
            whole.push(output(token))
        assert (await whole.next()).token_ids[0] == 0
        assert cancelled == ["r"]

    asyncio.run(play())


def test_a_reader_that_keeps_up_may_read_any_amount() -> None:
    async def play() -> None:
        stream = Stream("r", 2, buffer_bytes=64 << 10, cancel=lambda: pytest.fail("cancelled"))
        for token in range(100):
            for index in range(2):
                stream.push(Output("r", index, (token,), "x" * 4000))
            for _ in range(2):
                assert (await stream.next()).token_ids == [token]

    asyncio.run(play())


def test_an_abandoned_stream_keeps_nothing_and_still_finishes() -> None:
    async def play() -> None:
        stream = Stream("r", 1)
        stream.abandon()
        stream.push(Output("r", 0, (1,), "x"))
        stream.push(Output("r", 0, finish_reason=FinishReason.CANCELLED))
        assert stream.finished
        assert await stream.next() is None

    asyncio.run(play())


def test_the_router_wakes_the_loop_once_a_batch() -> None:
    class Loop:
        """Counts the wake-ups; runs what it was given when asked."""

        def __init__(self) -> None:
            self.calls: list = []

        def call_soon_threadsafe(self, function) -> None:
            self.calls.append(function)

    async def play() -> None:
        loop = Loop()
        router = OutputRouter(loop)  # type: ignore[arg-type]
        streams = [router.open_stream(f"{i}", 1) for i in range(32)]
        for _ in range(3):
            for i in range(32):
                router.on_output(Output(f"{i}", 0, (7,), "x"))
        assert len(loop.calls) == 1
        loop.calls.pop()()
        assert [(await stream.next()).token_ids for stream in streams] == [[7, 7, 7]] * 32
        router.on_output(Output("0", 0, (8,), "y"))
        assert len(loop.calls) == 1

    asyncio.run(play())


def test_the_router_knows_who_is_running() -> None:
    async def play() -> None:
        router = OutputRouter(asyncio.get_running_loop())
        stream = router.open_stream("r", 2)
        with pytest.raises(DuplicateRequest, match="request_id"):
            router.open_stream("r", 1)
        router.on_output(Output("r", 0, finish_reason=FinishReason.STOP))
        router.on_output(Output("unheard of", 0, (1,), "x"))
        assert (await stream.next()).last is not None
        assert router.unfinished() == ["r"]
        router.on_output(Output("r", 1, (1,), "x", finish_reason=FinishReason.STOP))
        assert (await stream.next()).index == 1
        assert router.unfinished() == []
        router.open_stream("r", 1)

    asyncio.run(play())


def test_failing_everything_ends_everything_after_what_is_pending() -> None:
    async def play() -> None:
        router = OutputRouter(asyncio.get_running_loop())
        stream = router.open_stream("r", 2)
        router.on_output(Output("r", 0, (1,), "x"))
        router.fail_all("broken")
        assert (await stream.next()).token_ids == [1]
        with pytest.raises(StreamFailed, match="broken"):
            await stream.next()
        assert router.unfinished() == []

    asyncio.run(play())


@pytest.mark.parametrize("engine_failed", [True, False])
def test_a_request_that_fails_is_told_from_an_engine_that_does(engine_failed: bool) -> None:
    async def play() -> None:
        router = OutputRouter(asyncio.get_running_loop())
        stream = router.open_stream("r", 1)
        last = FinishReason.ERROR
        router.on_output(
            Output("r", 0, finish_reason=last, error="broken", engine_failed=engine_failed)
        )
        with pytest.raises(StreamFailed, match="broken") as raised:
            await stream.next()
        assert isinstance(raised.value, RequestFailed) != engine_failed

    asyncio.run(play())


def test_outputs_after_the_loop_has_closed_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    router = OutputRouter(loop)
    loop.close()
    for _ in range(2):
        router.on_output(Output("r", 0, (1,), "x"))
