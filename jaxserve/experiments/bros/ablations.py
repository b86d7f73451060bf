"""What shared blocks bring (BROS section 7.4.1, Figure 13), and what it costs to keep best-effort
requests from starving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.bros.mixed import MixedCase, MixedResults
from jaxserve.experiments.bros.setting import BROS, HIGHEST, LABELS, Part
from jaxserve.experiments.common.claims import Row, Section, table
from jaxserve.experiments.common.figures import bars
from jaxserve.experiments.common.seeds import over

MODEL = "OPT-30B"
RATE = 10.0  # section 7.4.1
Switches = tuple[tuple[str, float | bool], ...]
COLUMNS = (
    # title, number, format, factor
    ("latency, s", "latency", ".3f", 1.0),
    ("TTFT, %", "ttft", ".1f", 100.0),
    ("TPOT, %", "tpot", ".1f", 100.0),
    ("P99 TBT, %", "tbt", ".1f", 100.0),
    ("best-effort, 1/s", "best_effort", ".2f", 1.0),
)


class Varied(Part):
    """BROS with parameters, a line each."""

    def variants(self) -> dict[str, Switches]:
        """Parameters by what they are called."""
        raise NotImplementedError

    def model(self) -> str:
        """The one at which they are compared."""
        return MODEL if MODEL in self.scale.models else self.scale.models[0]

    def settings(self) -> Iterator[tuple[str, str, float]]:
        """Model, data set and rate."""
        raise NotImplementedError

    def cases(self) -> Iterator[MixedCase]:
        """Each setting with each of the variants."""
        for setting in self.settings():
            for switches in self.variants().values():
                yield from self.seeds(BROS, *setting, switches)

    def lines(self, results: MixedResults, more: tuple[tuple[str, str, str, float], ...]) -> str:
        """A table with a line a setting and variant."""
        columns, rows = (*COLUMNS, *more), []
        for model, data, rate in self.settings():
            for name, switches in self.variants().items():
                cases = self.seeds(BROS, model, data, rate, switches)
                cells = [
                    over(results, cases, number).text(form, factor)
                    for _, number, form, factor in columns
                ]
                rows.append([f"{LABELS[data]}, {model}, {rate:g}/s", name, *cells])
        return table(["", "", *(title for title, *_ in columns)], rows)


class Sharing(Varied):
    """7.4.1, Figure 13."""

    def variants(self) -> dict[str, Switches]:
        """With shared blocks, and without."""
        return {"`bros`": (), "`bros:sharing=false`": (("sharing", False),)}

    def settings(self) -> Iterator[tuple[str, str, float]]:
        """OPT-30B at 10 requests/s."""
        model = self.model()
        for data in self.scale.data_sets:
            yield model, data, min(RATE, self.scale.rates(model)[-1])

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 3 of the page."""
        on, off = self.variants().values()
        ours, drawn = [], dict[str, float]()
        for setting in self.settings():
            said = [LABELS[setting[1]]]
            for name, number in (("TTFT", "ttft"), ("TPOT", "tpot")):
                shared, alone = (
                    over(results, self.seeds(BROS, *setting, switches), number).mean
                    for switches in (on, off)
                )
                drawn[f"{said[0]}\n{name}\nshared"] = 100 * shared
                drawn[f"{said[0]}\n{name}\nnot"] = 100 * alone
                times = f"{shared / alone:.2f}x" if alone else "more"
                said.append(f"{name} {times} ({shared:.1%} for {alone:.1%})")
            ours.append(", ".join(said))
        figure = "bros-13-sharing.svg"
        bars(figures / figure, [*drawn], [*drawn.values()], "attained, %", "{:.1f}")
        more = (
            ("step, ms", "step", ".1f", 1e3),
            ("preemptions", "preemptions", ".0f", 1.0),
            ("tokens recomputed", "recomputed", ",.0f", 1.0),
            ("slots saved", "saved", ",.0f", 1.0),
            ("slots loaded", "loaded", ",.0f", 1.0),
            ("shared blocks", "shared", ".1f", 1.0),
        )
        return Section(
            "3. Shared blocks (section 7.4.1, Figure 13)",
            "Slots are of one plane each: K and V of a token are two. Shared blocks: mean over "
            "time.",
            [Row("1.23x TTFT and 1.63x TPOT with shared blocks", "; ".join(ours), WHY_SHARING)],
            [(figure, "TTFT and TPOT attainment with shared blocks and without")],
            [self.lines(results, more)],
        )


class Starvation(Varied):
    """No part of the paper: what a best-effort request may count on."""

    def variants(self) -> dict[str, Switches]:
        """Without either, and with age limits and floors."""
        found: dict[str, Switches] = {"`bros`": ()}
        for age in self.scale.ages:
            found[f"`bros:max_age={age:g}`"] = (("max_age", age),)
        for floor in self.scale.floors:
            found[f"`bros:floor={floor:g}`"] = (("floor", floor),)
        return found

    def settings(self) -> Iterator[tuple[str, str, float]]:
        """The highest rate, at which little is left for best-effort requests."""
        model = self.model()
        yield model, self.scale.data_sets[0], self.scale.rates(model)[-1]

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 5 of the page."""
        return Section(
            "5. A share for best-effort requests",
            "The paper promises them nothing: where real-time requests take all there is, they "
            "starve. `max_age`: seconds without a token after which one comes before all others; "
            "`floor`: tokens a second of best-effort work that come before real-time work. Both "
            f"are off unless they are asked for. {self.model()} at {HIGHEST[self.model()]:g} "
            "requests/s, where memory and time are short:",
            [],
            [],
            [self.lines(results, (("best-effort tokens/s", "tokens", ".1f", 1.0),))],
        )


class Overload(Varied):
    """No part of the paper: whom to serve when not all can be in time."""

    def variants(self) -> dict[str, Switches]:
        """Those that are late behind all others, also where they take the last memory, and in their
        place as in the paper."""
        return {
            "`bros`": (),
            "`bros:late_watermark=0`": (("late_watermark", 0.0),),
            "`bros:late_last=false`": (("late_last", False),),
        }

    def settings(self) -> Iterator[tuple[str, str, float]]:
        """Near what a system can do, and beyond."""
        for model in self.scale.models:
            yield model, self.scale.data_sets[0], self.scale.rates(model)[-1]
            if len(self.scale.steps) > 1:
                yield model, self.scale.data_sets[0], self.scale.rates(model)[-2]

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 6 of the page."""
        return Section(
            "6. Overload",
            "In the paper's order (`late_last=false`) whoever is late comes first, and makes "
            "others late: once there are more real-time requests than can be served in time, "
            "nearly all are late. Here those that can still have their first token in time come "
            "before those that cannot, of whom one comes first after every 16 starts of others "
            "(`late_turn`); the others start where a tenth of the pool stays free "
            "(`late_watermark`). Ended: share of the real-time requests.",
            [],
            [],
            [self.lines(results, (("ended, %", "ended", ".1f", 100.0),))],
        )


class Pieces(Varied):
    """No part of the paper: prompts that fit no deadline, and requests that are yet to come."""

    def variants(self) -> dict[str, Switches]:
        """All that is otherwise than in the paper, and without each of it."""
        return {
            "`bros`": (),
            "`bros:chunked=false`": (("chunked", False),),
            "`bros:headroom=false`": (("headroom", False),),
            "`bros:late_turn=0`": (("late_turn", 0),),
        }

    def settings(self) -> Iterator[tuple[str, str, float]]:
        """The largest model, whose prompts take longest, below its highest rate."""
        model = self.scale.models[-1]
        for rate in self.scale.rates(model)[:2]:
            yield model, self.scale.data_sets[0], rate

    def section(self, results: MixedResults, figures: Path) -> Section:
        """Section 8 of the page."""
        return Section(
            "8. Prompts in pieces",
            "A real-time prompt that takes longer than any deadline leaves fits no batch if it is "
            "whole (`chunked=false`, the paper): it waits until the others stop coming. In pieces "
            "it gets what they leave, before best-effort requests, whose prompts are cut as well. "
            "`headroom`: late prompts and best-effort requests leave a batch so short that one "
            "who comes right after it was planned can be in time. `late_turn`: see section 6.",
            [],
            [],
            [self.lines(results, (("ended, %", "ended", ".1f", 100.0),))],
        )


WHY_SHARING = (
    "What a real-time request gains is memory in blocks that best-effort ones have begun; without, "
    "they lose their caches and compute them again."
)
