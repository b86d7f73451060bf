"""On Sarathi's batches, and with long contexts (Apt-Serve section 6.7, Figures 11 and 12)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jaxserve.experiments.aptserve.robust import MODEL
from jaxserve.experiments.aptserve.setting import LABELS, PROJECTED, Lines, Part
from jaxserve.experiments.common.claims import Row, Section, percent, table
from jaxserve.experiments.common.figures import Panel, chart
from jaxserve.experiments.common.online import OnlineCase, OnlineResults, place_of, workload_of
from jaxserve.sched.cost.cost_model import BatchFeatures
from jaxserve.sched.simulation.capacity import crossing
from jaxserve.sched.simulation.systems.hardware import MODELS

CHUNKED = "aptserve_s"


class Chunked(Lines):
    """Figure 11."""

    systems = ("vllm", "sarathi", PROJECTED, CHUNKED)

    def panels(self) -> Iterator[tuple[str, str]]:
        """MODEL with every data set."""
        for data in self.scale.data_sets:
            yield MODEL, data

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 6 of the page: Apt-Serve on Sarathi's batches against both by themselves."""
        name = "aptserve-11-chunked.png"
        names = {system: system for system in self.systems}
        panels = [self.panel(results, model, data, names) for model, data in self.panels()]
        chart(figures / name, [panels], "requests/s")
        rows = [
            [
                LABELS[data],
                *(
                    " / ".join(
                        str(crossing(self.attainments(results, system, model, data), level))
                        for level in self.scale.levels
                    )
                    for system in self.systems
                ),
            ]
            for model, data in self.panels()
        ]
        levels = " / ".join(f"{level:.0%}" for level in self.scale.levels)
        header = [f"requests/s at {levels}", *(f"`{system}`" for system in self.systems)]
        return Section(
            "6. On chunked prefill and mixed batches (section 6.7, Figure 11)",
            "OPT-13B, hidden caches projected.",
            [self.row(results, below) for below in ("sarathi", PROJECTED)],
            [(name, "Attainment against rate on chunked prefills")],
            [table(header, rows)],
        )

    def row(self, results: OnlineResults, below: str) -> Row:
        """The rate that `aptserve_s` sustains over the one that `below` does, by level and data
        set. Bounds of the two rates are not marked."""

        def rate(system: str, data: str, level: float) -> float:
            return crossing(self.attainments(results, system, MODEL, data), level).rate

        return Row(
            f"`{CHUNKED}` is better than `{below}`",
            "its rate over that: "
            + "; ".join(
                f"at {level:.0%} "
                + ", ".join(
                    f"{rate(CHUNKED, data, level) / rate(below, data, level):.3g}x ({LABELS[data]})"
                    for _, data in self.panels()
                )
                for level in self.scale.levels
            ),
            PRICE,
        )


PRICE = "Projected hidden caches cost too much for either of them to take many: see 3."
LONG = {
    # data set: GPUs, rates
    "wikitext": (1, (1.0, 2.0, 4.0, 8.0)),
    "arxiv": (2, (0.5, 1.0, 2.0, 4.0)),
    "bookcorpus": (4, (0.25, 0.5, 1.0, 2.0)),
}
TITLES = {"wikitext": "WikiText", "arxiv": "arXiv", "bookcorpus": "BookCorpus"}
LONG_MODELS = ("llama-3-8b", "yi-6b")
LONG_SLO = (10.0, 1.0)
LONG_C = 32768


class LongContexts(Part):
    """Figure 12."""

    systems = ("vllm", "aptserve")

    def settings(self) -> Iterator[tuple[str, str, tuple[float, ...]]]:
        """Model, data set and the rates to try, requests/s; only the first of each where the scale
        has one model."""
        quick = len(self.scale.models) == 1
        for model in LONG_MODELS[: 1 if quick else None]:
            for data, (_, rates) in list(LONG.items())[: 1 if quick else None]:
                yield model, data, rates[: 1 if quick else None]

    def cases(self, results: OnlineResults) -> Iterator[OnlineCase]:
        """Every setting's rates with both systems."""
        for model, data, rates in self.settings():
            for rate in rates:
                for system in self.systems:
                    yield self.of(system, model, data, rate)

    def of(self, system: str, model: str, data: str, rate: float) -> OnlineCase:
        """On the data set's GPUs (LONG), prompts as long as they are, C = LONG_C; rate in
        requests/s."""
        gpus, _ = LONG[data]
        return OnlineCase(
            system,
            f"{model}@{gpus}xa100-40g",
            data,
            rate,
            *LONG_SLO,
            requests=self.scale.long_requests,
            longest=None,
            max_batch_tokens=LONG_C,
        )

    def section(self, results: OnlineResults, figures: Path) -> Section:
        """Section 7 of the page: models of grouped queries, so of K and V only."""
        name = "aptserve-12-long.png"
        panels: dict[str, list[Panel | None]] = {}
        for model, data, rates in self.settings():
            panels.setdefault(model, []).append(
                Panel(
                    f"{TITLES[data]}, {model}",
                    "SLO attainment",
                    {
                        system: (
                            rates,
                            [results[self.of(system, model, data, r)].attainment for r in rates],
                        )
                        for system in self.systems
                    },
                    log_y=False,
                )
            )
        chart(figures / name, list(panels.values()), "requests/s")
        return Section(
            "7. Long contexts (section 6.7, Figure 12)",
            "TTFT 10 s, P99 TBT 1 s; WikiText on one A100-40G, arXiv on two, BookCorpus on four; "
            f"prompts as long as they are, C = {LONG_C:,}.",
            self.rows(results),
            [(name, "Attainment against rate with long contexts")],
            [self.table(results)],
        )

    def rows(self, results: OnlineResults) -> list[Row]:
        """The claims on attainment, and on that of P99 TBT alone, counted over settings and
        rates."""
        better = tbt = total = 0
        for model, data, rates in self.settings():
            for rate in rates:
                apt, vllm = (results[self.of(s, model, data, rate)] for s in ("aptserve", "vllm"))
                total += 1
                better += apt.attainment > vllm.attainment
                tbt += apt.tbt_attainment < vllm.tbt_attainment
        sizes = ", ".join(
            f"{MODELS[m].hidden_bytes // 2:,} elements against {MODELS[m].kv_bytes // 2:,} ({m})"
            for m in LONG_MODELS
        )
        return [
            Row(
                "`aptserve` attains more than `vllm` with both models",
                f"more in {better} of {total} settings, all of it by its schedule: K and V only",
                "A token's hidden vector is larger than its K and V in these grouped-query models: "
                f"{sizes}. So there is no hidden cache to gain from, and ours offers none.",
            ),
            Row(
                "P99 TBT is hard to keep: neither exceeds 60% on BookCorpus, Yi-6B, 0.5/s",
                self._tbt(results)
                + f"`aptserve` attains less of TBT than `vllm` in {tbt} of {total} settings",
                self.prefill(),
            ),
        ]

    def prefill(self) -> str:
        """How long one of the longest prompts holds the others up."""
        case = self.of("vllm", "yi-6b", "bookcorpus", 0.5)
        tokens = int(workload_of(case).prompt_len.mean())
        batch = BatchFeatures(tokens, tokens, 0, 0, tokens**2, 1, 0)
        step = float(place_of(case).cost_model.batch_time(batch))
        return (
            f"A prefill of BookCorpus's mean prompt, {tokens:,} tokens, takes {step:.2g} s here, "
            "within the target, and a step has no more than one or two of them. Our four GPUs "
            "share attention evenly, which is the best case."
        )

    def _tbt(self, results: OnlineResults) -> str:
        cases = [self.of(system, "yi-6b", "bookcorpus", 0.5) for system in self.systems]
        if any(case not in results for case in cases):
            return ""
        each = [f"{percent(results[case].tbt_attainment)}% (`{case.policy}`)" for case in cases]
        return " and ".join(each) + " attain it there; "

    def table(self, results: OnlineResults) -> str:
        """Attainment of both systems at every rate, percent, and of TTFT and P99 TBT apart."""
        rows = []
        for model, data, rates in self.settings():
            for rate in rates:
                cells = [
                    f"{percent(n.attainment)} ({percent(n.ttft_attainment)}, "
                    f"{percent(n.tbt_attainment)})"
                    for system in self.systems
                    for n in [results[self.of(system, model, data, rate)]]
                ]
                rows.append([f"{TITLES[data]}, {model}, {rate:g}/s", *cells])
        header = ["attainment, % (TTFT, TBT)", *(f"`{system}`" for system in self.systems)]
        return table(header, rows)
