"""Makes docs/bros.md: what BROS claims, and what the simulator says.

    python -m jaxserve.experiments.bros
    python -m jaxserve.experiments.bros --numbers=docs/figures/bros.json
    python -m jaxserve.experiments.bros --quick --out=/some/folder

Every number and figure on the page comes from the runs of this command, on all cores. --numbers
takes what an earlier run has simulated, and how long its plans took, from there and runs only what
is missing: after a change of a text, say, or when a run was interrupted. --quick runs toy sizes
that say nothing about the claims.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from jaxserve.experiments.bros.ablations import Overload, Pieces, Sharing, Starvation
from jaxserve.experiments.bros.batches import Batches
from jaxserve.experiments.bros.mixed import OUTPUT, PROMPT, MixedNumbers, run
from jaxserve.experiments.bros.overhead import Overhead
from jaxserve.experiments.bros.setting import LABELS, MODELS, QUICK, Part, Scale
from jaxserve.experiments.bros.tradeoff import Attainment, Tradeoff
from jaxserve.experiments.bros.verdict import Verdict
from jaxserve.experiments.common.claims import table
from jaxserve.experiments.common.grid import Known, dump, run_asked
from jaxserve.experiments.common.page import Page, flags, write_page
from jaxserve.sched.simulation.systems.systems import system

PARTS: tuple[type[Part], ...] = (
    Verdict,
    Tradeoff,
    Attainment,
    Sharing,
    Overhead,
    Starvation,
    Overload,
    Batches,
    Pieces,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, as `write_page`."""
    return write_page("bros", flags("bros", __doc__), argv, _make)


def _make(args: Namespace, figures: Path) -> Page:
    scale = QUICK if args.quick else Scale()
    parts = [make(scale) for make in PARTS]
    wanted = {case for part in parts for case in part.cases()}
    known = Known(Path(args.numbers), MixedNumbers) if args.numbers else None
    results = run_asked(
        lambda _: wanted, args.jobs, run, known, lambda some: dump(some, figures / "bros.json")
    )
    introduction = INTRODUCTION.format(scale=scale, tokens=_tokens(scale), traces=_traces(scale))
    return Page(
        "BROS's claims, simulated",
        "python -m jaxserve.experiments.bros",
        [introduction, _systems(scale)],
        [part.section(results, figures) for part in parts],
        "[bros-policy.md](bros-policy.md) says how the policy differs from the paper's",
    )


def _traces(scale: Scale) -> str:
    """How many of each point: `3 (ShareGPT), 1 (LMSYS)`."""
    numbers = zip(scale.seeds, scale.data_sets, strict=True)
    return ", ".join(f"{number} ({LABELS[data]})" for number, data in numbers)


def _tokens(scale: Scale) -> int:
    """That a batch of best-effort requests gets to have on average, to thousands."""
    one = (PROMPT.low + PROMPT.high + OUTPUT.low + OUTPUT.high) / 2
    return round(scale.batch * one / 1000) * 1000


def _systems(scale: Scale) -> str:
    rows = []
    for name in scale.models:
        place = system(MODELS[name])
        model, prices = place.cost_model, place.cost_model.coefficients
        rows.append(
            [
                name,
                f"`{MODELS[name]}`",
                f"{place.kv_tokens:,}",
                f"{1e3 * model.num_layers * prices.token_bias:.1f}",
                f"{1e6 * model.num_layers * prices.decode_kv:.2f}",
                f"{1e6 * model.num_layers * 2 * prices.swapped_slot:.1f}",
                ", ".join(f"{rate:g}" for rate in scale.rates(name)),
            ]
        )
    header = [
        "",
        "system",
        "tokens of K and V",
        "weights, ms a step",
        "K and V of a token, us",
        "of a token to the host, us",
        "rates, 1/s",
    ]
    return table(header, rows)


INTRODUCTION = """\
Paper: Borui Wan et al., "Efficient LLM Serving on Hybrid Real-time and Best-effort Requests" \
(BROS, arXiv 2504.09590). Real-time requests: lengths with the moments of Table 2, cut to 2,048 \
tokens, Poisson arrivals, targets of 0.4 s (TTFT) and 0.2 s (TPOT). Best-effort requests: U(512, \
1024) tokens in and U(32, 128) out, submitted {scale.batch} at a time, each batch when all of the \
last one have ended. The paper does not say how many. {scale.batch} get to have {tokens:,} tokens \
on average, where the cache of the OPT models holds 56,000 and 61,000: enough to keep requests \
waiting, as in the paper, whose vLLM meets 1.3% of the TTFT targets; section 7 has others. \
Each trace lasts \
{scale.duration:g} s and is cut off then. Of each point there are {traces}, the same ones for \
every policy; ±: half of the 95% confidence interval of the mean (Student's t). The simulator \
serves with the engine's own scheduler, block accounting (blocks of 16 tokens, two owners each) \
and overlap of planning and running; copies to and from the host go on beside the batches, over \
PCIe, and the host holds as many tokens as the GPUs; batch times come from \
`jaxserve.sched.simulation.systems.systems.scale` ([systems.md](systems.md)). C = 2,048 tokens a \
batch and \
256 requests, P = 512 for `priority` and `edf`, which compute prompts in chunks. Nothing was tuned \
towards the paper's results."""
