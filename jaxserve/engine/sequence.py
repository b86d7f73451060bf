"""One continuation of one request, from submission to its last `Output`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.engine.output import FinishReason, Output, Timings, TokenLogprobs, Usage
from jaxserve.engine.stops import ContinuationText
from jaxserve.sched.request import Request

NO_SLOT = -1


class Continuation:
    """Host side of continuation `index` of a request. Engine thread only.

    row: in the scheduler's table. number: from 0 in the order of arrival. slot: on the device while
    it holds cache, else NO_SLOT.
    Results that arrive once `finished` is set belong to nobody.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        row: int,
        number: int,
        text: ContinuationText,
        on_output: Callable[[Output], None],
    ) -> None:
        self.request = request
        self.index = index
        self.row = row
        self.number = number
        self.slot = NO_SLOT
        self.finished = False
        self.output_tokens: list[int] = []
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self._text = text
        self._on_output = on_output

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Known tokens [first, end) of prompt and output together."""
        split = len(self.request.prompt)
        prompt = self.request.prompt[first:end]
        return (*prompt, *self.output_tokens[max(first - split, 0) : max(end - split, 0)])

    def feed(
        self, token: int, now: float, preemptions: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> FinishReason | None:
        """Takes one sampled token, streams what it says, and returns why the text ends, if so."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.output_tokens.append(token)
        delta, reason = self._text.feed(token)
        self.finished = reason is not None
        self._send(
            token_ids=(token,),
            text=delta,
            logprobs=logprobs,
            token_times=(now,),
            finish_reason=reason,
            preemptions=preemptions,
            now=now,
        )
        return reason

    def end(self, reason: FinishReason, now: float, preemptions: int, error: str = "") -> None:
        """Ends it from outside: cancelled, or the engine failed."""
        self.finished = True
        self._send(
            text=self._text.flush(),
            finish_reason=reason,
            preemptions=preemptions,
            now=now,
            error=error,
        )

    def _send(
        self,
        *,
        now: float,
        preemptions: int,
        finish_reason: FinishReason | None,
        token_ids: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprobs, ...] = (),
        token_times: tuple[float, ...] = (),
        error: str = "",
    ) -> None:
        usage = timings = None
        if finish_reason is not None:
            arrival = self.request.arrival
            usage = Usage(len(self.request.prompt), len(self.output_tokens), preemptions)
            timings = Timings(
                queue=time_or(self.first_scheduled, now) - arrival,
                ttft=time_or(self.first_token, now) - arrival,
                total=now - arrival,
            )
        self._on_output(
            Output(
                self.request.id,
                self.index,
                token_ids,
                text,
                logprobs,
                finish_reason,
                usage,
                timings,
                error,
                token_times,
            )
        )


def time_or(time: float | None, now: float) -> float:
    """A time that may not have come yet. Not `or`: zero is a time on some clocks."""
    return now if time is None else time
