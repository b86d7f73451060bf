"""What the page says before its sections: how the paper is read, and on what it is run."""

from __future__ import annotations

import numpy as np

from jaxserve.experiments.accelgen.case import SloCase, workload_of
from jaxserve.experiments.accelgen.places import BLOCK, PLACES, Place
from jaxserve.experiments.accelgen.requests import prefill_seconds
from jaxserve.experiments.accelgen.setting import Scale
from jaxserve.experiments.common.claims import table
from jaxserve.sched.cost.saturation import flat_from

SAMPLE = 20_000  # requests, as the paper has them
UTILISED = (0.64, 0.83)  # of compute and cache, Sarathi in section 3.2


def paragraphs(scale: Scale) -> list[str]:
    """All of them."""
    first = scale.first
    place = PLACES[first]
    asked = workload_of(SloCase("vllm", first, 8.0, requests=SAMPLE))
    prompt, output = float(asked.prompt_len.mean()), float(asked.output_len.mean())
    reachable = float((asked.ttft >= prefill_seconds(place, asked.prompt_len)).mean())
    return [
        PAPER,
        LENGTHS.format(
            prompt=round(prompt),
            output=round(output),
            model=first,
            implied=round(implied_output(place, prompt)),
            pivot=place.pivot,
            tokens=place.kv_tokens,
        ),
        TARGETS.format(late=1 - reachable),
        RUNS.format(scale=scale, block=BLOCK),
        _systems(scale),
    ]


def implied_output(place: Place, prompt: float) -> float:
    """The mean output, tokens, with which steps have the share of the pivot, beside the share of
    the cache, that the paper measures of Sarathi: with r requests in the cache a step has r decodes
    and, as long as as many come as go, r prompt / output tokens of prompts."""
    compute, cache = UTILISED[0] * place.pivot, UTILISED[1] * place.kv_tokens
    output = 1.0
    for _ in range(50):
        rows = cache / (prompt + output / 2)
        output = prompt * rows / (compute - rows)
    return output


def saturation(place: Place, most: int = 2048) -> int:
    """The least number of tokens of a step with nearly the throughput that any up to `most` has."""
    sizes = np.arange(1, most + 1)
    return int(sizes[flat_from(sizes, prefill_seconds(place, sizes))])


def _systems(scale: Scale) -> str:
    rows = []
    for name in scale.models:
        place = PLACES[name]
        step = float(prefill_seconds(place, np.array([place.pivot]))[0])
        asked = workload_of(SloCase("vllm", name, 8.0, requests=SAMPLE))
        rows.append(
            [
                name,
                f"`{place.name}`",
                f"{place.kv_tokens:,}",
                f"{place.longest:,}",
                f"{asked.prompt_len.mean():,.0f}",
                str(place.pivot),
                str(saturation(place)),
                f"{1e3 * step:.0f}",
                ", ".join(f"{rate:g}" for rate in scale.rates(name)),
            ]
        )
    header = [
        "",
        "system",
        "tokens of K and V",
        "longest prompt",
        "mean prompt",
        "pivot, paper",
        "pivot, here",
        "a step of the paper's pivot, ms",
        "rates, 1/s",
    ]
    return table(header, rows)


PAPER = """\
Paper: Haiying Shen and Tanmoy Sen, "AccelGen: Heterogeneous SLO-Guaranteed High-Throughput LLM \
Inference Serving for Diverse Applications". OPT-13B and Llama-13B (Llama-2's shape) on one A100 \
with 12 GB of cache, OPT-175B on eight with 33.75 GB each, Llama-3-70B on four with 135 GB in all; \
tensor parallelism only, where the paper has pipelines for OPT-175B too."""

LENGTHS = """\
Requests: Alpaca, ShareGPT and, 35%, BookCorpus, whose lengths the paper prints as one histogram \
(Figure 8): 34% of the prompts in [10, 512] tokens, 52% in [512, 4K], 14% above. That is not 35% \
of long prompts, unless three in five requests from BookCorpus are shorter than 4K, and it wants \
ShareGPT's prompts longer than others print them; so they are drawn \
(`mixed_prompts` in `jaxserve.sched.workloads.lengths`). Its outputs, 13% of more than 4K tokens, \
contradict its limit of 2,048 (section 3.1), and its own utilisation: with {tokens:,} tokens of \
cache for {model}, 83% of them and 64% of {pivot} tokens a step in use go together only if outputs \
have {implied} tokens on average. Here outputs are those that are printed of the three data sets \
elsewhere, {output} tokens on average; section 9 has those of Figure 8. Prompts that the cache \
does not hold together with 2,048 tokens are drawn shorter: of up to 100K tokens no more than \
the table says. Every request may write 2,048."""

TARGETS = """\
Targets as in section 3.2: a TTFT of what prompts of the same 512 tokens take alone, on average, \
times a scale from [0.5, 1.5], and a TBT of 0.1875 s times a scale from [0.75, 1.25] (section \
6.1). So the TTFT is shorter than the prompt takes alone, on an idle system, for {late:.0%} of the \
requests: nobody can meet those, and who comes while a step runs waits for its end besides. \
Section 10 has TTFTs ten times as long."""

RUNS = """\
Traces of {scale.requests} requests (the paper: 20,000), Poisson, served to their end; of each \
point there are {scale.seeds}, the same ones for every policy, and ±: half of the 95% confidence \
interval of the mean (Student's t), which is wide because the few long prompts of a trace decide \
how much it is: what policies differ by is surer than that. 8 requests/s are far beyond what these \
systems can serve here, seven to sixteen times, so that there a trace is a queue that is worked \
off; the other rates are half of what the fastest finish a second, that, and twice that. The \
simulator serves with the engine's own scheduler, block accounting (blocks of {block} tokens) and \
overlap of planning and running; batch times come from `jaxserve.sched.simulation.systems.systems` \
([systems.md](systems.md)). Nothing was tuned towards the paper's results."""
