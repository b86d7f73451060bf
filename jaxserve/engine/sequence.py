"""One continuation of one request, from submission to its last `Output`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from jaxserve.engine.device.sampling_state import RequestRow, SlotParams
from jaxserve.engine.failures import refuse
from jaxserve.engine.output import COMPLETE, FinishReason, Output, Timings, TokenLogprobs, Usage
from jaxserve.engine.stats import RequestStats
from jaxserve.engine.text.grammars import Matcher
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.sched.cost.reachability import SloProblem
from jaxserve.sched.request import Request
from jaxserve.sched.slo.verdict import Verdict, judge, tbt_that_counts

NO_SLOT = -1


class Continuation:
    """Host side of continuation `index` of a request. Engine thread only.

    row: in the scheduler's table. number: from 0 in the order of arrival. slot: on the device while
    it holds cache, else NO_SLOT. problems: with its targets. token_times: when its tokens came, in
    seconds on the engine's clock. preempted: likewise, when it lost all of its cache. untold: the
    first token of its prompt whose log-probability no launched step tells; None if none is to.
    Results that arrive once `finished` is set belong to nobody. What it raises is its own affair:
    its text has failed, or its caller.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        row: int,
        number: int,
        text: ContinuationText,
        sampling_row: RequestRow,
        on_output: Callable[[Output], None],
        problems: tuple[SloProblem, ...] = (),
    ) -> None:
        self.request = request
        self.index = index
        self.row = row
        self.number = number
        self.slot = NO_SLOT
        self.finished = False
        self.output_tokens: list[int] = []
        self.first_scheduled: float | None = None
        self.token_times: list[float] = []
        self.preempted: list[float] = []
        asks = request.sampling.prompt_logprobs is not None and len(request.prompt) > 1
        self.untold: int | None = 1 if asks else None
        self._text, self._sampling_row = text, sampling_row
        self._on_output = on_output
        self._told = False  # of its end, or its caller has failed over it
        self._engine_failed = False
        self._problems = problems
        self._timings: Timings | None = None
        self._verdict: Verdict | None = None

    @property
    def matcher(self) -> Matcher | None:
        """Of its grammar, if it has one: it has taken in all of its tokens so far."""
        return self._text.matcher

    def slot_params(self) -> SlotParams:
        """What its slot on the device begins with."""
        return self._sampling_row.slot_params(self.index, self.output_tokens)

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Known tokens [first, end) of prompt and output together."""
        split = len(self.request.prompt)
        prompt = self.request.prompt[first:end]
        return (*prompt, *self.output_tokens[max(first - split, 0) : max(end - split, 0)])

    def tell_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Streams those of the next tokens of its prompt."""
        self._tell(Output(self.request.id, self.index, prompt_logprobs=logprobs))

    def feed(
        self, token: int, now: float, preemptions: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> FinishReason | None:
        """Takes one sampled token, streams what it says, and returns why the text ends, if so."""
        self.token_times.append(now)
        self.output_tokens.append(token)
        delta, reason = self._text.feed(token)
        self.finished = reason is not None
        news = Output(
            self.request.id,
            self.index,
            (token,),
            delta,
            logprobs,
            finish_reason=reason,
            token_times=(now,),
        )
        self._tell(news if reason is None else self._last(news, reason, now, preemptions))
        return reason

    def fail(self, now: float, preemptions: int, error: str, *, engine_failed: bool) -> None:
        """Ends it with an error, whatever of it may be what failed; its caller is told once."""
        self._engine_failed = engine_failed
        try:
            if not self._told:
                self.end(FinishReason.ERROR, now, preemptions, error)
        except BaseException:
            if not self._told:
                why = FinishReason.ERROR, error, (self.index,)
                refuse(self.request, self._tell, *why, engine_failed=engine_failed)

    def end(self, reason: FinishReason, now: float, preemptions: int, error: str = "") -> None:
        """Ends it from outside: cancelled, or the engine failed."""
        self.finished = True
        text, own = self._text.flush(), (self.request.id, self.index)
        news = Output(*own, text=text, finish_reason=reason, error=error)
        self._tell(self._last(news, reason, now, preemptions))

    def _last(self, news: Output, reason: FinishReason, now: float, preemptions: int) -> Output:
        """With what the last one says besides."""
        self._conclude(reason, now)
        return dataclasses.replace(
            news,
            usage=Usage(len(self.request.prompt), len(self.output_tokens), preemptions),
            timings=self._timings,
            verdict=self._verdict,
            engine_failed=self._engine_failed,
        )

    def _tell(self, output: Output) -> None:
        self._told = output.finish_reason is not None
        self._on_output(output)

    def _conclude(self, reason: FinishReason, now: float) -> None:
        """Its times, and whether they are what it asked for."""
        request, came = self.request, self.token_times
        scheduled = now if self.first_scheduled is None else self.first_scheduled
        self._timings = Timings(
            queue=scheduled - request.arrival,
            ttft=(came[0] if came else now) - request.arrival,
            total=now - request.arrival,
            tbt=tbt_that_counts(came),
            tbt_mean=(came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else None,
            tbt_max=max((b - a for a, b in itertools.pairwise(came)), default=None),
            preempted=tuple(when - request.arrival for when in self.preempted),
        )
        self._verdict = judge(
            request,
            came,
            now,
            complete=reason in COMPLETE,
            failed=reason is FinishReason.ERROR,
            problems=self._problems,
        )

    def stats(self, reason: FinishReason, now: float, preemptions: int) -> RequestStats:
        """What the observers are told of its end, which was now."""
        if self._timings is None:  # its caller has not been told of it
            self._conclude(reason, now)
        assert self._timings is not None
        return RequestStats(
            number=self.number,
            finish_reason=reason,
            tier=self.request.tier,
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.output_tokens),
            preemptions=preemptions,
            queue_time=self._timings.queue,
            ttft=self._timings.ttft if self.token_times else None,
            e2e=now - self.request.arrival,
            verdict=self._verdict,
        )
