"""The least work of a request for device and host, whatever the schedule.

It follows from three facts. Every coefficient of a cost model is at least 0, so a batch takes at
least the time of any subset of its rows. A request has at most one token of each step, and all of
its prompt is computed before the first. And chunks of c tokens after m cached ones together cost as
much as one chunk: the sum of c^2 + 2cm is p^2 for a prompt of p tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from jaxserve.sched.cost.cost_model import Coefficients, InferMaxCostModel, LinearCostModel
from jaxserve.simulator.settings import Setting
from jaxserve.simulator.workloads.workload import Workload


@dataclass(frozen=True)
class Resource:
    """The least time that n requests take on a serial resource, in seconds.

    Attributes:
        first: float64 [n], each request's own part of the batch times, until its first token.
        rest: float64 [n], the same after its first token.
        batch: Additional time of any batch.
    """

    first: np.ndarray
    rest: np.ndarray
    batch: float


@dataclass(frozen=True)
class Shares:
    """Shares of a batch that requests take. Within a batch they sum to at most 1, so requests need
    at least the sum of their shares in batches.

    Attributes:
        first: float64 [n], until the first token.
        rest: float64 [n], after it.
    """

    first: np.ndarray
    rest: np.ndarray


@dataclass(frozen=True)
class LeastWork:
    """Lower bounds on the work of n requests.

    Attributes:
        resources: The device and the host.
        shares: Ways to bound the number of batches: by rows, tokens and cache.
        ttft: float64 [n], seconds from arrival to first token on an idle machine.
        jct: float64 [n], seconds from arrival to last token on an idle machine.
        met: bool [n], requests that may attain their targets there.
    """

    resources: tuple[Resource, ...]
    shares: tuple[Shares, ...]
    ttft: np.ndarray
    jct: np.ndarray
    met: np.ndarray

    @classmethod
    def of_workload(cls, workload: Workload, setting: Setting, hidden: bool) -> LeastWork:
        """The work of a workload. hidden: whether there are hidden caches."""
        prices = _Prices.of(setting, hidden)
        p, later = workload.prompt_len, workload.output_len - 1
        owner = np.repeat(np.arange(len(p)), later)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(later) - later, later) + 1
        known = p[owner] + place  # tokens when a step makes the next of them
        each = prices.later(known)

        def over(values: np.ndarray) -> np.ndarray:
            return np.bincount(owner, weights=values, minlength=len(p))

        chunks = -(-p // setting.limits.max_batch_tokens)
        device = Resource(prices.prompt(p), over(each), prices.batch)
        host, row = setting.host, setting.host.plan_row + setting.host.launch_row
        loop = Resource(row * chunks, row * later, host.receive + host.plan + host.launch)
        limits, planes = setting.limits, 1 if hidden else 2
        slots = max(setting.num_blocks * setting.block_size, 1)
        rows = min(limits.max_rows, limits.max_batch_tokens)
        shares = (
            Shares(chunks / rows, later / rows),
            Shares(p / limits.max_batch_tokens, later / limits.max_batch_tokens),
            # Tokens in the pool at the end of a prompt, and before each later token.
            Shares(planes * p / slots, over(planes * (known - 1.0)) / slots),
        )
        ttft = loop.batch + row + device.first + chunks * prices.batch
        jct = ttft + device.rest + later * prices.batch
        slow = _slow_gaps(each + prices.batch, place, workload.tbt[owner], setting)
        within = later - over(slow.astype(float))  # gaps that may be within the target
        tbt = (later < 1) | (within > np.floor(0.99 * (later - 1)))
        met = (ttft <= _more(workload.ttft)) & (jct <= _more(latest(workload))) & tbt
        return cls((device, loop), shares, ttft, jct, met)


def latest(workload: Workload) -> np.ndarray:
    """The longest time from arrival to last token with which each request can attain all of its
    targets, float64 [n], seconds.

    The 99th percentile of n times between tokens is a value, or lies a share f of the way from one
    to the next. Up to n = 100 the next one is the largest: all others are within the target, and it
    is within target / f.
    """
    gaps = workload.output_len - 1
    place = 0.99 * np.maximum(gaps - 1, 0)
    below = np.floor(place)
    with np.errstate(divide="ignore"):
        largest = np.where(gaps > 1, 1 / (place - below), 1.0)
    largest = np.where(below + 2 >= gaps, largest, np.inf)
    decoding = np.zeros(len(gaps))
    some = gaps > 0
    decoding[some] = workload.tbt[some] * (gaps[some] - 1 + largest[some])
    return np.asarray(np.minimum(workload.jct, workload.ttft + decoding))


def _slow_gaps(
    step: np.ndarray, place: np.ndarray, tbt: np.ndarray, setting: Setting
) -> np.ndarray:
    """Which times between tokens cannot be within the target, bool; at least this many are not.
    step: least seconds of the later token's step.

    If the host takes no time, or plans when a step has ended, a token arrives when its step ends,
        and steps follow one another. Otherwise a step is launched after the tokens of the step
        before the last have come: two gaps together are at least as long as the second one's step.
    """
    if not setting.overlap or not any(setting.host.as_dict().values()):
        return np.asarray(step > _more(tbt))
    return np.asarray((place % 2 == 0) & (step > _more(2 * tbt)))


def _more(seconds: np.ndarray) -> np.ndarray:
    """Slightly longer times, since sums in another order may be larger."""
    return np.asarray(seconds * (1 + 1e-9) + 1e-9)


@dataclass(frozen=True)
class _Prices:
    """Seconds, for all layers. batch: of any batch; token, decode, prefill: of one; read: of a
    token that a decode has cached; quad, before: of a chunk's c^2 + 2cm, and m. short: tokens by
    which a cost model may undercount those read."""

    batch: float = 0.0
    token: float = 0.0
    decode: float = 0.0
    prefill: float = 0.0
    read: float = 0.0
    quad: float = 0.0
    before: float = 0.0
    short: int = 0

    @classmethod
    def of(cls, setting: Setting, hidden: bool) -> _Prices:
        """All 0 for unknown cost models, since nothing can be said about them."""
        model = setting.cost_model
        linear = model.linear if type(model) is InferMaxCostModel else model
        if type(linear) is not LinearCostModel:
            return cls()
        k, factor, short = linear.coefficients, 1.0, 0
        if isinstance(model, InferMaxCostModel):
            if min(model.residual) < 0:
                return cls()
            factor, short = min(1.0, model.attention_factor), 1  # the mean is rounded down
        found = _of_a_layer(k, factor, short, _padded(setting), hidden)
        each = k.per_expert * linear.experts_per_token  # read by a batch of one token
        found = replace(found, batch=found.batch + each)
        scaled = {f.name: linear.num_layers * getattr(found, f.name) for f in fields(cls)}
        return cls(**{**scaled, "short": short})

    def prompt(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of whole prompts, float64 [n]."""
        return np.asarray(self.token * tokens + self.prefill + self.quad * tokens**2.0)

    def later(self, known: np.ndarray) -> np.ndarray:
        """Seconds of a step that makes a token after `known` tokens: as a decode, or as a prefill
        of c >= 2 of them after m = known - c cached ones. That cost is concave in m, so it is
        lowest at one of the ends, c = 2 or m = 0."""
        decode = self.token + self.decode + self.read * (known - self.short)
        two = self.quad * (4.0 * known - 4) + self.before * (known - 2)
        again = 2 * self.token + self.prefill + np.minimum(two, self.quad * known**2.0)
        return np.asarray(np.minimum(decode, again))


def _of_a_layer(k: Coefficients, factor: float, short: int, padded: float, hidden: bool) -> _Prices:
    """factor: of the attention terms; padded: of tokens."""
    return _Prices(
        batch=k.token_bias + factor * min(k.decode_bias, k.prefill_bias),
        token=k.per_token * padded,
        decode=k.per_decode,
        prefill=k.per_prefill,
        read=factor * (min(k.decode_kv, k.hidden_token) if hidden else k.decode_kv),
        quad=factor * k.prefill_quad,
        before=factor * (min(k.prefill_m, k.hidden_prefill) if hidden else k.prefill_m),
        short=short,
    )


def _padded(setting: Setting) -> float:
    """Padding only adds tokens, except that sizes beyond the last bucket count as the last."""
    padding, limits = setting.padding, setting.limits
    if padding is None:
        return 1.0
    most = limits.max_batch_tokens
    singles = min(limits.max_rows, most)
    return min(1.0, padding.tokens[-1] / most, padding.rows[-1] / singles)
