"""What the policies are given: the workloads of the four papers, and two of several tiers.

A line of WORKLOADS is all that a workload needs. Targets are those of its paper where it has some.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.cost.reachability import prefill_times
from jaxserve.sched.request import SLO, Tier
from jaxserve.sched.slo.classes import seconds_or_inf
from jaxserve.sched.slo.slo_columns import SloColumns
from jaxserve.simulator.systems.systems import system
from jaxserve.simulator.workloads.guessable import KINDS, Guessable
from jaxserve.simulator.workloads.lengths import MIXES, sampler
from jaxserve.simulator.workloads.sessions import SESSIONS
from jaxserve.simulator.workloads.specs import WorkloadSpec
from jaxserve.simulator.workloads.traces import read_trace
from jaxserve.simulator.workloads.workload import Lengths, Workload, WorkloadError, gamma_arrivals

OPT, LLAMA = "opt-13b@a100-40g", "llama-3-70b@4xa100"
SYSTEMS = {OPT: "OPT-13B on an A100-40G", LLAMA: "Llama-3-70B on four A100-80G"}
LONGEST = {OPT: 2048, LLAMA: 8192}  # tokens that the models' positions allow, and C
Targets = Mapping[str, SLO]

# Apt-Serve Table 3, 13B and 66B: 66B on four A100s is what comes nearest to the larger system.
CHAT: Targets = {OPT: SLO(1.0, 1.0), LLAMA: SLO(2.0, 1.0)}
CODE: Targets = {OPT: SLO(0.5, 0.5), LLAMA: SLO(1.5, 0.5)}
DOCUMENT: Targets = {OPT: SLO(4.0, 1.0), LLAMA: SLO(5.0, 1.0)}
LONG: Targets = dict.fromkeys(SYSTEMS, SLO(10.0, 1.0))  # Apt-Serve section 6.7, Figure 12
REALTIME: Targets = dict.fromkeys(SYSTEMS, SLO(0.4, 0.2))  # BROS section 7.1
BATCH: Targets = dict.fromkeys(SYSTEMS, SLO(jct=60.0))
SOON: Targets = dict.fromkeys(SYSTEMS, SLO(jct=30.0))
INTERACTIVE: Targets = {OPT: SLO(0.5, 0.1), LLAMA: SLO(1.0, 0.15)}
STANDARD: Targets = {OPT: SLO(2.0, 0.2), LLAMA: SLO(4.0, 0.2)}
# A loop of tools waits for 20 first tokens, of which an idle server has half within 0.13 s, as
# nearly all of each prompt is found, and 99% within 1.9 s.
TOOLS: Targets = dict.fromkeys(SYSTEMS, SLO(2.0, 0.2))
# AccelGen sections 3.2 and 6.1, drawn for each request: TTFT is a scale times what a prompt of its
# length takes alone, TBT a scale times the time in which a token is read. The paper's TTFT has no
# SLACK: half of the requests could not meet it on an idle server.
SLACK, TTFT_SCALES, PROMPT_GROUP = 5.0, (0.5, 1.5), 512
READING, TBT_SCALES = 0.1875, (0.75, 1.25)
# An overload that lasts and ends: seconds, and the rate in times of the saturating one.
LASTING = ((600.0, 2.0), (300.0, 0.5))
AHEAD = 2  # decode steps of an idle system before a prompt's own: in flight, and planned behind it
TRIES = 100  # to draw what an idle system can serve in time


@dataclass(frozen=True)
class Part:
    """The requests of one kind in a workload.

    Attributes:
        lengths: Name of a sampler.
        targets: SLOs by system; None to draw AccelGen's.
        share: Of the workload's requests.
        tier: Of all of them.
    """

    lengths: str
    targets: Targets | None
    share: float = 1.0
    tier: Tier = Tier.REALTIME


@dataclass(frozen=True)
class Entry:
    """A workload.

    Attributes:
        kind: The group under which the page lists it.
        source: Where it and its targets are from.
        parts: The requests that it is mixed from.
        cv: Coefficient of variation of the gaps between arrivals; 1 is Poisson.
        trace: File name of a trace whose lengths and arrivals replace the drawn ones, if at hand.
        systems: Those that it is run on.
        lasting: Those on which it has an overload that lasts, too.
        longer: How much longer its traces are than others': where work may wait for a minute, a
            short one would never see that it has to be done.
    """

    kind: str
    source: str
    parts: tuple[Part, ...]
    cv: float = 1.0
    trace: str = ""
    systems: tuple[str, ...] = tuple(SYSTEMS)
    lasting: tuple[str, ...] = ()
    longer: float = 1.0

    @property
    def held_out(self) -> bool:
        """Whether it is run only where it is asked for: nothing was tried out on it."""
        return self.kind in (HELD_OUT, REUSE)

    @property
    def reuse(self) -> bool:
        """Whether it is of sessions, and what was computed once is found again. No paper's is."""
        return self.kind == REUSE

    def longest(self, system: str) -> int:
        """Tokens of its longest request there, and C."""
        most = (SESSIONS[part.lengths].max_context for part in self.parts if self.reuse)
        return max([LONGEST[system], *most])


SHORT, PROMPTS, MIXED, PRODUCTION, TIERS, HELD_OUT, REUSE = (
    "chats and completions",
    "long prompts",
    "InferMax's mixes",
    "the Azure hours",
    "several tiers",
    "held out",
    "sessions, with prefix caching",
)
WORKLOADS = {
    "alpaca": Entry(SHORT, "AccelGen 6.1", (Part("alpaca", None),)),
    "sharegpt": Entry(SHORT, "Apt-Serve 6.2", (Part("sharegpt", CHAT),)),
    "humaneval": Entry(SHORT, "Apt-Serve 6.2", (Part("humaneval", CODE),)),
    "lmsys": Entry(SHORT, "BROS 7.1", (Part("lmsys", REALTIME),)),
    "longbench": Entry(PROMPTS, "Apt-Serve 6.2", (Part("longbench", DOCUMENT),), lasting=(LLAMA,)),
    "wikitext": Entry(PROMPTS, "Apt-Serve 6.7", (Part("wikitext", LONG),)),
    "arxiv": Entry(PROMPTS, "Apt-Serve 6.7", (Part("arxiv", LONG),), systems=(LLAMA,)),
    "bookcorpus": Entry(PROMPTS, "Apt-Serve 6.7", (Part("bookcorpus", LONG),), systems=(LLAMA,)),
    "mixed-prompts": Entry(PROMPTS, "AccelGen 3.1 and 6.1", (Part("mixed-prompts", None),)),
    **{
        mix: Entry(
            MIXED, "InferMax 4.6", (Part(mix, CHAT),), lasting=(OPT,) if mix == "lilo+siso" else ()
        )
        for mix in MIXES
    },
    "azure-conv": Entry(
        PRODUCTION,
        "InferMax 6",
        (Part("azure-conv", CHAT),),
        cv=1.09,
        lasting=(LLAMA,),
        trace="AzureLLMInferenceTrace_conv.csv",
    ),
    "azure-code": Entry(
        PRODUCTION,
        "Azure's other hour",
        (Part("azure-code", DOCUMENT),),
        cv=13.2,
        trace="AzureLLMInferenceTrace_code.csv",
    ),
    "two-tiers": Entry(
        TIERS,
        "BROS 7.1",
        (
            Part("lmsys", REALTIME, 0.5),
            Part("best-effort", BATCH, 0.5, Tier.BEST_EFFORT),
        ),
        longer=4.5,
    ),
    "three-classes": Entry(
        TIERS,
        "a chat, an assistant, and documents that may wait",
        (
            Part("sharegpt", INTERACTIVE, 0.4),
            Part("alpaca", STANDARD, 0.4),
            Part("longbench", BATCH, 0.2, Tier.BEST_EFFORT),
        ),
        lasting=(OPT,),
        longer=4.5,
    ),
    "bursty-chats": Entry(
        HELD_OUT, "chats in a hurry, in bursts", (Part("sharegpt", INTERACTIVE),), cv=4.0
    ),
    "code-and-documents": Entry(
        HELD_OUT,
        "completions beside documents",
        (Part("humaneval", CODE, 0.5), Part("longbench", DOCUMENT, 0.5)),
    ),
    "articles-before-batch": Entry(
        HELD_OUT,
        "long articles, and short jobs that may wait",
        (Part("wikitext", LONG, 0.3), Part("alpaca", SOON, 0.7, Tier.BEST_EFFORT)),
        longer=2.5,
    ),
    "jobs": Entry(HELD_OUT, "whole answers by a time", (Part("lmsys", SOON),), longer=2.5),
    "bursty-conversations": Entry(
        HELD_OUT, "an assistant with long prompts", (Part("azure-conv", STANDARD),), cv=3.0
    ),
    "conversation": Entry(
        REUSE, "chats of several turns", (Part("conversation", STANDARD),), systems=(LLAMA,)
    ),
    "agent": Entry(REUSE, "loops of tools", (Part("agent", TOOLS),), systems=(LLAMA,)),
}


def make_workload(
    name: str,
    place: str,
    rate: float,
    count: int,
    seed: int,
    trace: str = "",
    *,
    lasting: bool = False,
) -> Workload:
    """Requests of a workload. With another rate they are the same, at scaled arrivals, but for
    sessions, whose users think as long as ever.

    Args:
        name: In WORKLOADS.
        place: Name of the system.
        rate: Requests/s; of an overload that lasts, the rate that saturates.
        count: Number of requests.
        seed: Of lengths and arrivals; of a trace, where the stretch to take begins.
        trace: Path of its trace; "" to draw.
        lasting: Whether the rate changes as in LASTING, brought to as long as `count` requests
            take.

    Raises:
        WorkloadError: The trace is invalid, or has fewer requests; or its targets are such that
            nobody can be in time.
    """
    entry, rng = WORKLOADS[name], np.random.default_rng((seed, 11))
    if entry.reuse:
        return _sessions(entry, place, rate, count, seed)
    if trace:
        found = _stretch(trace, count, seed)
        arrival, parts = found[0], [found[1]]
    else:
        arrival = gamma_arrivals(rate, entry.cv, count, rng)
        arrival = arrival - arrival[0]
        parts = [
            sampler(part.lengths)(size, rng) if size else _nobody()
            for part, size in zip(entry.parts, _sizes(entry, count), strict=True)
        ]
    parts = [_within(one, LONGEST[place]) for one in parts]
    terms = [_terms(part, one, place, rng) for part, one in zip(entry.parts, parts, strict=True)]
    if not trace:
        again = np.random.default_rng((seed, 12))  # so that the others stay as they are
        for part, one, asked in zip(entry.parts, parts, terms, strict=True):
            _draw_again(part, one, asked, place, again)
    order = np.arange(count) if trace else rng.permutation(count)
    lengths = Lengths(
        np.concatenate([one.prompt_len for one in parts])[order],
        np.concatenate([one.output_len for one in parts])[order],
    )
    # Nobody asks for a max_tokens: a server gives what the model has left.
    limit = LONGEST[place] - lengths.prompt_len
    kinds = zip(entry.parts, parts, strict=True)
    guessable = Guessable.joined(
        [Guessable.same(len(one), KINDS.get(p.lengths)) for p, one in kinds]
    )
    made = Workload.create(
        arrival,
        lengths,
        limit=limit,
        terms=SloColumns.joined(terms).select(order),
        guessable=guessable[order],
    ).at_rate(rate)
    return replace(made, arrival=_lasting(made.arrival, rate, count)) if lasting else made


def _sessions(entry: Entry, place: str, rate: float, count: int, seed: int) -> Workload:
    (part,) = entry.parts
    made = WorkloadSpec(part.lengths, count, rate=rate).make_workload(seed)
    terms = _terms(part, made.lengths, place, np.random.default_rng((seed, 11)))
    limit = entry.longest(place) - made.prompt_len
    return replace(made.with_terms(terms), arrival=made.arrival - made.arrival[0], limit=limit)


def lasting_count(rate: float, share: float = 1.0) -> int:
    """Requests of LASTING where so many a second saturate. share: of its seconds."""
    return round(rate * share * sum(seconds * times for seconds, times in LASTING))


def _lasting(arrival: np.ndarray, rate: float, count: int) -> np.ndarray:
    """Arrivals at a steady rate, moved to where the rates of LASTING have them."""
    share = count / rate / sum(seconds * times for seconds, times in LASTING)
    seconds, times = share * np.array([one[0] for one in LASTING]), [one[1] for one in LASTING]
    steady = np.cumsum(seconds * times)
    ends = np.cumsum(seconds)
    last = arrival > steady[-1]  # as chance has it, some come after the end
    moved = np.interp(arrival, np.append(0.0, steady), np.append(0.0, ends))
    return np.where(last, ends[-1] + (arrival - steady[-1]) / times[-1], moved)


def _sizes(entry: Entry, count: int) -> list[int]:
    """Requests of each part, `count` in all."""
    ends = np.rint(np.cumsum([part.share for part in entry.parts]) * count).astype(int)
    return [int(size) for size in np.diff(ends, prepend=0)]


def _nobody() -> Lengths:
    return Lengths(np.zeros(0, np.int64), np.zeros(0, np.int64))


def _within(lengths: Lengths, longest: int) -> Lengths:
    """Outputs cut to half of what the model takes, prompts to what that leaves."""
    output = np.minimum(lengths.output_len, longest // 2)
    return Lengths(np.minimum(lengths.prompt_len, longest - output), output)


@cache
def _hour(path: str) -> tuple[np.ndarray, Lengths]:
    found = read_trace(path)
    if found.arrival is None:
        raise WorkloadError(f"{path}: a trace with arrivals is needed")
    return found.arrival, found.lengths


def _stretch(path: str, count: int, seed: int) -> tuple[np.ndarray, Lengths]:
    """Arrivals, from 0 on, and lengths of `count` consecutive requests. Seeds begin at the thirds
    of the hour in turn."""
    arrival, lengths = _hour(path)
    if len(arrival) < count:
        raise WorkloadError(f"{path}: {count} requests are needed, there are {len(arrival)}")
    begin = seed * len(arrival) // 3 % (len(arrival) - count + 1)
    which = slice(begin, begin + count)
    part = Lengths(lengths.prompt_len[which], lengths.output_len[which])
    return arrival[which] - arrival[begin], part


def _terms(part: Part, lengths: Lengths, place: str, rng: np.random.Generator) -> SloColumns:
    terms = replace(
        SloColumns.none(len(lengths)),
        tier=np.full(len(lengths), part.tier, np.int8),
        classes=(part.lengths,),
    )
    if part.targets is None:
        ttft = rng.uniform(*TTFT_SCALES, len(lengths)) * SLACK * _alone(lengths, system(place))
        tbt = rng.uniform(*TBT_SCALES, len(lengths)) * READING
        return replace(terms, ttft=ttft, tbt=tbt)
    slo = part.targets[place]
    ttft, tbt, jct = (
        np.full(len(lengths), seconds_or_inf(target)) for target in (slo.ttft, slo.tbt, slo.jct)
    )
    return replace(terms, ttft=ttft, tbt=tbt, jct=jct)


def _draw_again(
    part: Part, lengths: Lengths, terms: SloColumns, place: str, rng: np.random.Generator
) -> None:
    """Draws again, in place, what an idle system cannot serve in time: targets that were drawn,
    else lengths. WorkloadError if nothing helps."""
    for _ in range(TRIES):
        late = np.flatnonzero(~_in_time_alone(lengths, terms, place))
        if not len(late):
            return
        mine = Lengths(lengths.prompt_len[late], lengths.output_len[late])
        if part.targets is None:
            drawn = _terms(part, mine, place, rng)
            terms.ttft[late], terms.tbt[late] = drawn.ttft, drawn.tbt
        else:
            mine = _within(sampler(part.lengths)(len(late), rng), LONGEST[place])
            lengths.prompt_len[late], lengths.output_len[late] = mine.prompt_len, mine.output_len
    raise WorkloadError(f"{part.lengths}, {place}: an idle system serves some of it too late")


def _in_time_alone(lengths: Lengths, terms: SloColumns, place: str) -> np.ndarray:
    """Who can be in time on a system that is idle but for a stream that decodes, bool [n]: behind
    AHEAD of its steps, and with the prompt in one step."""
    model, prompt = system(place).cost_model, lengths.prompt_len
    last = np.asarray(
        model.batch_time(BatchFeatures.of_decodes(np.ones(len(prompt)), lengths.total))
    )
    first = AHEAD * last + prefill_times(model.batch_time, prompt, LONGEST[place])
    end = first + (lengths.output_len - 1) * last
    return np.asarray((first <= terms.ttft) & (last <= terms.tbt) & (end <= terms.jct))


def _alone(lengths: Lengths, place: System) -> np.ndarray:
    """Seconds to prefill each prompt alone, at the mean length of its group of similar prompts,
    float64 [n]."""
    group = lengths.prompt_len // PROMPT_GROUP
    sums = np.bincount(group, weights=lengths.prompt_len)
    mean = (sums / np.maximum(np.bincount(group), 1))[group]
    one = np.ones(len(mean))
    features = BatchFeatures(mean, mean, 0 * one, 0 * one, mean**2, one, 0 * one)
    return np.asarray(place.cost_model.batch_time(features))


def trace_of(name: str, folder: str) -> str:
    """Path of the workload's trace in the folder; "" if it has none, or no folder is given.
    WorkloadError if the file is missing."""
    file = WORKLOADS[name].trace
    if not (folder and file):
        return ""
    path = Path(folder) / file
    if not path.is_file():
        raise WorkloadError(f"--azure: there is no {path}")
    return str(path)
