"""One continuation of one request, from submission to its last `Output`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.engine.block_keys import KeyChain
from jaxserve.engine.device.sampling_state import RequestRow, SlotParams
from jaxserve.engine.drafts.speculator import Speculator
from jaxserve.engine.failures import refuse
from jaxserve.engine.output import COMPLETE, FinishReason, Output, Timings, TokenLogprobs, Usage
from jaxserve.engine.stats import RequestStats
from jaxserve.engine.text.matcher import Matcher
from jaxserve.engine.text.stop_conditions import ContinuationText
from jaxserve.sched.cost.reachability import SloProblem
from jaxserve.sched.request import Generated, Request
from jaxserve.sched.slo.verdict import Verdict, judge, longest_tbt, tbt_that_counts

NO_SLOT = NO_ROW = -1


class Continuation:
    """One of a request's n continuations, on the host. Engine thread only.

    Results that arrive after `finished` is set are dropped. An exception from a method means that
    this continuation's text processing or its caller has failed, nothing else.

    Args:
        request: the submitted request.
        index: which of the request's continuations.
        row: its row in the scheduler's table; NO_ROW before it has one.
        number: counts continuations from 0 in the order of arrival.
        text: turns its tokens into text.
        sampling_row: sampling parameters for the device.
        on_output: the caller's callback.
        problems: what is wrong with its latency targets.
        block_keys: keys of its blocks; None without reuse.
        speculator: drafts its next tokens; None without drafts.
        submitted: when it was submitted, in seconds on the engine's clock; None: when it arrived.

    Attributes:
        slot: device slot while it holds a cache, else NO_SLOT.
        finished: whether it has ended.
        output_tokens: generated tokens.
        first_scheduled: when it was first scheduled, in seconds on the engine's clock, or None.
        token_times: when each token came, on the same clock.
        cached_tokens: prompt tokens found in the cache when it was first scheduled.
        preempted: when it lost all of its cache, on the same clock.
        next_prompt_logprob: first prompt token whose log-probability no launched step reports; None
        if all are reported.
        next_pooled_token: first prompt token that no launched step counts for `pooled`; None if all
        are counted, or no vector is wanted.
        pooled: sum of the hidden states counted so far, in digits as in `Pooled`, or the wanted
        logits.
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
        block_keys: KeyChain | None = None,
        speculator: Speculator | None = None,
        submitted: float | None = None,
    ) -> None:
        self.request = request
        self.index = index
        self.row = row
        self.number = number
        self.slot = NO_SLOT
        self.finished = False
        before = request.generated[index] if request.generated else Generated()
        self.output_tokens = list(before.tokens)
        self.first_scheduled: float | None = None
        self.cached_tokens = 0
        self.token_times = list(before.times)
        self.preempted: list[float] = []
        asks = request.sampling.prompt_logprobs is not None and len(request.prompt) > 1
        self.next_prompt_logprob: int | None = 1 if asks else None
        self.next_pooled_token: int | None = None if request.pooling is None else 0
        self.pooled: np.ndarray | None = None
        self._text, self._sampling_row = text, sampling_row
        self._on_output = on_output
        self._given_up = before.given_up
        self._told = False  # whether the last `Output` was sent, or its callback raised
        self._engine_failed = False
        self._submitted = request.arrival if submitted is None else submitted
        self._preprocess = 0.0 if request.moved else self._submitted - request.arrival
        self._problems = problems
        self.block_keys, self.speculator = block_keys, speculator
        self._timings: Timings | None = None
        self._verdict: Verdict | None = None

    @property
    def matcher(self) -> Matcher | None:
        """Its state in the request's grammar after all tokens so far; None without a grammar."""
        return self._text.matcher

    def slot_params(self) -> SlotParams:
        """Sampling parameters and state for its device slot."""
        return self._sampling_row.slot_params(self.index, self.output_tokens)

    def tokens(self, first: int, end: int) -> Sequence[int]:
        """Known tokens [first, end) of prompt and output together."""
        split = len(self.request.prompt)
        prompt = self.request.prompt[first:end]
        return (*prompt, *self.output_tokens[max(first - split, 0) : max(end - split, 0)])

    def tell_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Streams the log-probabilities of the next prompt tokens."""
        self._tell(Output(self.request.id, self.index, prompt_logprobs=logprobs))

    def expect_missed(self) -> None:
        """Reports that its targets will be missed, unless its caller knows."""
        if self._given_up:
            return
        self._given_up = True
        self._tell(Output(self.request.id, self.index, expected_missed=True))

    def replay(self, text: str, reason: FinishReason | None) -> None:
        """Tells its caller again what another engine has generated.

        Args:
            text: the text of its tokens so far.
            reason: why it ended with them; None if it goes on.
        """
        before, times = self.request.generated[self.index], tuple(self.token_times)
        if not before.tokens:
            return
        news = Output(
            self.request.id,
            self.index,
            before.tokens,
            text,
            tuple(
                TokenLogprobs(token, *logprobs)
                for token, logprobs in zip(before.tokens, before.logprobs, strict=False)
            ),
            finish_reason=reason,
            token_times=times,
            stop_string=self._text.stop_string,
            expected_missed=before.given_up,
            replayed=True,
        )
        self.finished = reason is not None
        self._tell(news if reason is None else self._last(news, reason, times[-1], 0))

    def feed(
        self,
        tokens: Sequence[int],
        now: float,
        preemptions: int,
        logprobs: tuple[TokenLogprobs, ...],
        *,
        drafted: int = 0,
    ) -> FinishReason | None:
        """Takes the tokens of a step and streams them. Tokens after its end are dropped.

        Args:
            tokens: at least one.
            now: seconds on the engine's clock.
            preemptions: how often it has lost its cache so far.
            logprobs: the tokens' log-probabilities; empty if not requested.
            drafted: number of its drafted tokens that were checked; all tokens but the last are
                accepted drafts.

        Returns:
            Why the continuation ends with one of these tokens, or None.
        """
        taken, text, reason = 0, "", None
        for token in tokens:
            self.token_times.append(now)
            self.output_tokens.append(token)
            delta, reason = self._text.feed(token)
            text, taken = text + delta, taken + 1
            if reason is not None:
                break
        self.finished = reason is not None
        if drafted and self.speculator is not None:
            self.speculator.checked(drafted, min(taken, len(tokens) - 1))
        news = Output(
            self.request.id,
            self.index,
            tuple(tokens[:taken]),
            text,
            logprobs[:taken],
            finish_reason=reason,
            token_times=(now,) * taken,
            stop_string=self._text.stop_string,
        )
        self._tell(news if reason is None else self._last(news, reason, now, preemptions))
        return reason

    def end_pooled(
        self, token: int, vector: np.ndarray, now: float, preemptions: int
    ) -> FinishReason:
        """Ends it with its vector.

        Args:
            token: token sampled after the prompt, which is not reported.
            vector: the result.
            now: seconds on the engine's clock.
            preemptions: how often it has lost its cache so far.
        """
        self.token_times.append(now)
        self.output_tokens.append(token)
        self.finished, reason = True, FinishReason.STOP
        news = Output(self.request.id, self.index, finish_reason=reason, pooled=vector)
        self._tell(self._last(news, reason, now, preemptions))
        return reason

    def fail(self, now: float, preemptions: int, error: str, *, engine_failed: bool) -> None:
        """Ends it with an error, even if its own text processing has failed. The caller gets at
        most one last `Output`.

        Args:
            now: seconds on the engine's clock.
            preemptions: how often it has lost its cache.
            error: the message.
            engine_failed: see `Output.engine_failed`.
        """
        self._engine_failed = engine_failed
        try:
            if not self._told:
                self.end(FinishReason.ERROR, now, preemptions, error)
        except BaseException:
            if not self._told:
                refuse(
                    self.request,
                    self._tell,
                    FinishReason.ERROR,
                    error=error,
                    indices=(self.index,),
                    engine_failed=engine_failed,
                )

    def end(self, reason: FinishReason, now: float, preemptions: int, error: str = "") -> None:
        """Ends it from outside: it is cancelled, or something failed.

        Args:
            reason: why it ends.
            now: seconds on the engine's clock.
            preemptions: how often it has lost its cache.
            error: the message, with FinishReason.ERROR.
        """
        self.finished = True
        text = self._text.flush()
        news = Output(self.request.id, self.index, text=text, finish_reason=reason, error=error)
        self._tell(self._last(news, reason, now, preemptions))

    def _last(self, news: Output, reason: FinishReason, now: float, preemptions: int) -> Output:
        """`news` completed to the last `Output`, with usage, timings and verdict."""
        self._conclude(reason, now)
        accepted, rejected = self._drafts()
        return dataclasses.replace(
            news,
            usage=Usage(
                prompt_tokens=len(self.request.prompt),
                output_tokens=len(self.output_tokens),
                preemptions=preemptions,
                cached_tokens=self.cached_tokens,
                accepted_draft_tokens=accepted,
                rejected_draft_tokens=rejected,
            ),
            timings=self._timings,
            verdict=self._verdict,
            engine_failed=self._engine_failed,
        )

    def _drafts(self) -> tuple[int, int]:
        """Its numbers of accepted and of rejected drafted tokens."""
        speculator = self.speculator
        if speculator is None:
            return 0, 0
        return speculator.accepted, speculator.drafted - speculator.accepted

    def _tell(self, output: Output) -> None:
        self._told = output.finish_reason is not None
        self._on_output(output)

    def _conclude(self, reason: FinishReason, now: float) -> None:
        """Computes its timings, and whether its targets were met."""
        request, came = self.request, self.token_times
        scheduled = now if self.first_scheduled is None else self.first_scheduled
        self._timings = Timings(
            queue=scheduled - self._submitted,
            ttft=(came[0] if came else now) - request.arrival,
            total=now - request.arrival,
            tbt=tbt_that_counts(came),
            tbt_mean=(came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else None,
            tbt_max=longest_tbt(came),
            preempted=tuple(when - request.arrival for when in self.preempted),
            preprocess=self._preprocess,
            moved=request.moved,
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
        """The observers' record of a continuation that ends now."""
        if self._timings is None:  # no last `Output` was sent
            self._conclude(reason, now)
        assert self._timings is not None
        guessed, right = (0, 0) if self.speculator is None else self.speculator.guesses
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
            given_up=self._given_up,
            block_keys=() if self.block_keys is None else self.block_keys.keys,
            drafted=sum(self._drafts()),
            accepted=self._drafts()[0],
            guessed=guessed,
            right=right,
            preprocess_time=self._timings.preprocess,
        )
