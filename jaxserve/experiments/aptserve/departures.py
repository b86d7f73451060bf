"""Where `aptserve` departs from the paper, and what its charge for hidden caches brings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.aptserve.robust import KV, MODEL, Ablations
from jaxserve.experiments.aptserve.setting import ABSORBED, LABELS, PROJECTED, Part
from jaxserve.experiments.common.claims import Row, Section, percent, table
from jaxserve.experiments.common.online import OnlineCase, OnlineNumbers, OnlineResults

PENALTIES = ("step", "redecide", "remaining")
READS = {PROJECTED: "projected", ABSORBED: "absorbed"}


class Departures(Part):
    """All sections of the paper that `aptserve` reads otherwise than word for word."""

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """Each charge for either read, and K and V only, where `Ablations` has Poisson arrivals."""
        for data, rate in Ablations(self.scale).poisson():
            yield self.case(KV, MODEL, data, rate)
            for system in READS:
                for penalty in PENALTIES:
                    yield self.charged(system, data, rate, penalty)

    def charged(self, system: str, data: str, rate: float, penalty: str) -> OnlineCase:
        """A trace of MODEL; rate in requests/s, penalty as the policy's parameter."""
        return self.case(system, MODEL, data, rate, switches=(("penalty", penalty),))

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 9 of the page: a list, and a table of what a hidden cache may be charged."""
        return Section(
            "9. Where `aptserve` departs from the paper",
            "Not what the paper claims, but what its scheduler does. Names in brackets are "
            "parameters of the policy.",
            ROWS,
            [],
            [self.charges(results)],
        )

    def charges(self, results: OnlineResults) -> str:
        """Attainment with each charge."""

        def cell(n: OnlineNumbers) -> str:
            return (
                f"{percent(n.attainment)} ({n.hidden:.0%} hidden, {1e3 * n.step:.0f} ms, "
                f"{n.preemptions:,} preempted)"
            )

        rows = []
        for system, read in READS.items():
            for data, rate in Ablations(self.scale).poisson():
                kv = percent(results[self.case(KV, MODEL, data, rate)].attainment)
                found = [results[self.charged(system, data, rate, p)] for p in PENALTIES]
                rows.append([f"{LABELS[data]}, {rate:g}/s, {read}", kv, *map(cell, found)])
        header = ["CV 1", "K and V only", *(f"`penalty={p}`" for p in PENALTIES)]
        return CHARGES + table(header, rows)


ROWS = [
    Row(
        "5: in every iteration all running requests, or all waiting ones, are chosen among anew; "
        "who changes its kind of cache computes it again",
        "who runs goes on with the cache that it has; only when the pool lacks the blocks for the "
        "next tokens does the greedy decide among the running, over the whole pool; as few as "
        "possible of the others are preempted, and the rest pauses",
        "A cache computed again is a prefill that everybody waits for: see the table below, "
        "`redecide`.",
    ),
    Row(
        "4.2, Eq. 5: a hidden cache is charged for one iteration's delay, n rho t",
        "where reads project, for that of every step that its request is expected to take yet, as "
        "outputs so far tell; where they absorb, for one step's (`penalty`)",
        "The paper's charge goes with a decision for one iteration; ours keeps the kind.",
    ),
    Row(
        "5: a hidden cache becomes K and V by computing it again",
        "it is projected where it lies; but only if the steps ahead make good for that, and only "
        "in memory that nobody needs: a tenth of the pool (`headroom`), the K and V of all that "
        "wait, and a block a plane for each that runs stay free",
        "Whoever becomes K and V in memory that others then lack is preempted, or they are.",
    ),
    Row(
        "5: a prefill iteration has all the memory that the running leave",
        "starts leave 1% of the pool free while others run (`watermark`), as in vLLM",
        "The next decodes would preempt at once.",
    ),
    Row(
        "4.2: the value of a request is its pending time, near zero after a token",
        "at least the time of a step in which all decode",
        "At the end of the next step it will have waited for that long. With values of nothing the "
        "greedy has no order, and any penalty rules a hidden cache out.",
    ),
    Row(
        "4.2: who has violated its SLO has a near-zero constant for a value",
        "a millionth of its value, or what `slo_decay` says; it starts after all who are in time, "
        "and leaves the headroom free; late is who waits for its next token for longer than its "
        "target now",
        "A constant has no order among the late. And the fallback would come too late for those "
        "who arrive next, if the late had filled the memory before.",
    ),
    Row(
        "4.2: pending time is that since the last token",
        "a token on its way counts as there, and a step of prefills on the device as waited for",
        "Steps are planned while the one before them runs.",
    ),
    Row(
        "Appendix, Algorithm 1: the greedy ends with the first candidate that does not fit",
        "those behind it that still fit are taken too; whom C or the rows of a batch have no "
        "place for leave their memory to the others",
        "No memory stays idle; the value only grows, so that the bound holds.",
    ),
]
CHARGES = """\
What a hidden cache may be charged, with OPT-13B: one step's delay (`step`); the same, with the \
kind of every cache decided on anew in every step, as the paper has it (`redecide`); or that of \
all steps ahead (`remaining`). `aptserve` takes `remaining` where reads project, and `step` where \
they absorb: attainment in percent, the share of a batch's requests with hidden caches, the mean \
step, and preemptions. Projected, one step's charge takes hidden caches that slow all others for \
as long as they last, and deciding anew computes caches again that were about to be of use. \
Charged in full, next to none is worth it at this price.

"""
