"""Policies inside vLLM beside vLLM's own scheduling, under loads of requests with mixed targets.

    VENV/bin/python tools/vllm_cpu/scheduling.py --out=scheduling.json

OPT-125M's shapes with random weights, in float32, in one process, whose scheduler is exchanged
between runs. First the capacity: requests per second of vLLM's own scheduler with all of them at
once, and without targets. Then Poisson arrivals at multiples of it, the same for every scheduler,
one after the other; and again, in another order. Prints a table of the share of requests with
targets that were within all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import in_process
import numpy as np
from bench import shape
from workload import at_least_one

SYSTEMS = {
    "vLLM fcfs": (None, {}),
    "vLLM priority": (None, {"policy": "priority"}),
    "goodput": ("goodput", {}),
    "sarathi": ("sarathi", {}),
}
LOADS = (0.8, 1.2, 2.0)
# By kind of request: its share, its priority, and its targets in steps of a full batch.
KINDS = {
    "chat": (0.4, 0, {"ttft": 8, "tbt": 3}),
    "quick": (0.2, 0, {"ttft": 4, "tbt": 4}),
    "job": (0.2, 1, {"jct": 80}),
    "batch": (0.2, 2, {}),
}
ROWS, TOKENS, LENGTH = 32, 256, 512


@dataclass
class Asked:
    """A request and what became of it; times in seconds from the run's begin.

    Attributes:
        prompt: Token ids.
        most: Tokens to write.
        kind: Of KINDS.
        due: When it comes.
        times: When its tokens came.
    """

    prompt: list[int]
    most: int
    kind: str
    due: float
    times: list[float] = field(default_factory=list)


def requests(count: int, rate: float | None, seed: int, vocab: int) -> list[Asked]:
    """Requests of all kinds.

    Args:
        count: Their number.
        rate: How many come per second; None for all at once.
        seed: Of what is drawn.
        vocab: Token ids are below it.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1.0, count)
    due = np.zeros(count) if rate is None else np.cumsum(gaps) / rate
    kinds = rng.choice(list(KINDS), count, p=[share for share, _, _ in KINDS.values()])
    return [
        Asked(
            rng.integers(3, vocab, int(rng.integers(16, 161))).tolist(),
            int(rng.integers(8, 57)),
            str(kind),
            float(when),
        )
        for kind, when in zip(kinds, due, strict=True)
    ]


def serve(engine: Any, asked: Sequence[Asked], unit: float | None) -> float:
    """Serves the requests as they come. Returns the seconds that it took.

    Args:
        engine: vLLM's `LLMEngine`.
        asked: The requests, in order of their due times.
        unit: Seconds of a step, in which targets are said; None to say none.
    """
    import vllm

    coming, live, begin = list(reversed(asked)), dict[str, Asked](), time.monotonic()
    while coming or live:
        now = time.monotonic() - begin
        while coming and coming[-1].due <= now:
            one = coming.pop()
            _, priority, targets = KINDS[one.kind]
            said: dict[str, Any] = {}
            if unit is not None:
                said = {f"{name}_ms": 1000 * unit * value for name, value in targets.items()}
                said |= {} if targets else {"tier": "best_effort"}
            name = str(len(asked) - len(coming))
            engine.add_request(
                name,
                vllm.TokensPrompt(prompt_token_ids=one.prompt),
                vllm.SamplingParams(
                    temperature=0,
                    max_tokens=one.most,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=said,
                ),
                arrival_time=time.time() - (now - one.due),
                priority=priority,
            )
            live[name] = one
        if not live:
            time.sleep(max(coming[-1].due - (time.monotonic() - begin), 0))
            continue
        outputs, now = engine.step(), time.monotonic() - begin
        for output in outputs:
            one = live[output.request_id]
            one.times += [now] * (len(output.outputs[0].token_ids) - len(one.times))
            if output.finished:
                del live[output.request_id]
    return time.monotonic() - begin


def in_time(asked: Sequence[Asked], unit: float) -> dict[str, Any]:
    """How many requests with targets were within all of them, of how many, and by kind."""
    from jaxserve.sched.request import SLO, Request
    from jaxserve.sched.slo.verdict import judge

    met: dict[str, list[bool]] = {}
    for one in asked:
        targets = {name: unit * value for name, value in KINDS[one.kind][2].items()}
        request = Request("", (0,), slo=SLO(**targets), arrival=one.due)
        verdict = judge(request, one.times, one.times[-1], complete=True)
        if verdict is not None:
            met.setdefault(one.kind, []).append(verdict.met)
    every = [value for values in met.values() for value in values]
    kinds = {kind: f"{sum(values)}/{len(values)}" for kind, values in met.items()}
    return {"met": sum(every), "of": len(every), **kinds}


class HostTime:
    """Adds up what a scheduler's methods take; plans are part of `schedule`."""

    def __init__(self, scheduler: Any) -> None:
        self.seconds, self.steps = 0.0, 0
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name), name == "schedule"))

    def _timed(self, call: Any, counts: bool) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args, **options)
            self.seconds += time.perf_counter() - begin
            self.steps += counts
            return found

        return timed

    @property
    def milliseconds(self) -> float:
        """Of a step, so far."""
        return 1000 * self.seconds / max(self.steps, 1)


def measure(args: argparse.Namespace, engine: Any, core: Any, vocab: int) -> dict[str, Any]:
    """All runs. Rates in 1/s, times in seconds.

    Args:
        args: The command line's.
        engine: vLLM's `LLMEngine`.
        core: Its core.
        vocab: Token ids are below it.
    """
    systems = {
        name: in_process.scheduler(core, policy, **changes)
        for name, (policy, changes) in SYSTEMS.items()
    }
    host = {name: HostTime(one) for name, one in systems.items()}
    backlog = requests(100, None, args.seed, vocab)
    for one in systems.values():  # warm, and our cost models have learned
        in_process.exchange(core, one)
        serve(engine, requests(ROWS, None, args.seed + 1, vocab), None)
    full: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    tokens = sum(one.most for one in backlog)
    for number in range(args.rounds):
        for name in _order(systems, number):
            in_process.exchange(core, systems[name])
            before, cpu = host[name].steps, time.process_time()
            seconds = serve(engine, backlog, None)
            steps = host[name].steps - before
            run = {"seconds": seconds, "cpu": time.process_time() - cpu, "steps": steps}
            full[name].append(run)
            for one in backlog:
                one.times.clear()
            _say(f"{name}: {tokens / seconds:.1f} tokens/s with all at once, {json.dumps(run)}")
    own = full["vLLM fcfs"]
    unit = statistics.median(run["seconds"] / run["steps"] for run in own)
    capacity = len(backlog) / statistics.median(run["seconds"] for run in own)
    _say(f"capacity {capacity:.2f} requests/s, a step {1000 * unit:.0f} ms")
    runs = []
    for number in range(args.rounds):
        for load in LOADS:
            for name in _order(systems, number):
                in_process.exchange(core, systems[name])
                asked = requests(args.count, load * capacity, args.seed + 2 + number, vocab)
                seconds = serve(engine, asked, unit)
                found = {"system": name, "load": load, "round": number, "seconds": seconds}
                runs.append(found | in_time(asked, unit))
                _say(json.dumps(runs[-1]))
    return {
        "count": args.count,
        "tokens": tokens,
        "capacity": capacity,
        "unit": unit,
        "full": full,
        "runs": runs,
        "host_ms": {name: one.milliseconds for name, one in host.items()},
        "plan_ms": _plan_ms(),
    }


def _order(systems: dict[str, Any], number: int) -> list[str]:
    return list(systems)[:: -1 if number % 2 else 1]


def _plan_ms() -> float:
    """Milliseconds of our part of a step, the mean over our systems."""
    from jaxserve.vllm.metrics import HOST_SECONDS

    sums = {
        s.name: s.value
        for m in HOST_SECONDS.collect()
        for s in m.samples
        if s.labels.get("part") == "plan" and "bucket" not in s.name
    }
    name = "jaxserve:vllm_host_seconds"
    return 1000 * sums[f"{name}_sum"] / sums[f"{name}_count"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """Markdown, as in docs/vllm.md."""
    heads = [f"{load:g} times" for load in LOADS]
    heads += ["tokens/s, all at once", "of fcfs's", "per CPU second", "steps", "host, ms a step"]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    own = result["full"]["vLLM fcfs"]
    for name, full in result["full"].items():
        cells = []
        for load in LOADS:
            runs = [r for r in result["runs"] if r["system"] == name and r["load"] == load]
            cells.append(f"{sum(r['met'] for r in runs) / sum(r['of'] for r in runs):.0%}")
        seconds = statistics.median(run["seconds"] for run in full)
        cells.append(f"{result['tokens'] / seconds:.1f}")
        for what in ("seconds", "cpu"):
            ratios = [a[what] / b[what] for a, b in zip(own, full, strict=True)]
            cells.append(f"{statistics.median(ratios):.3f}")
        cells.append(f"{statistics.median(run['steps'] for run in full):.0f}")
        cells.append(f"{result['host_ms'][name]:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Of the host's time, plans take {result['plan_ms']:.2f} ms."])


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=at_least_one, default=150, help="requests of a run")
    parser.add_argument("--rounds", type=at_least_one, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file for the JSON")
    args = parser.parse_args(argv)
    config = shape("opt-125m")
    options = {"max_model_len": LENGTH, "max_num_seqs": ROWS, "max_num_batched_tokens": TOKENS}
    with (
        tempfile.TemporaryDirectory() as folder,
        in_process.engine(folder, config, enable_prefix_caching=False, **options) as (llm, core),
    ):
        result = measure(args, llm.llm_engine, core, config["vocab_size"])
    print(table(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
