"""The host time of a step by the length of the contexts, with which it must not grow.

    jaxserve bench context
    jaxserve bench context --contexts=1024,131072 --rows=1,32 --json

Runs the real engine over a device that computes nothing and returns tokens at once. So the times
are the host's alone, medians over the last steps of each kind: taking requests in, planning,
booking, packing the batch, detokenising and streaming. It also prints the most numbers of 4 bytes
that such a step sends to the device. Requests that decode together share a prompt, which the first
computes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.command import BenchParser
from jaxserve.command_line import print_result
from jaxserve.config import Config
from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.buckets import Buckets
from jaxserve.engine.device.sampling import SampleResult
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import Output
from jaxserve.engine.startup.assemble import assemble
from jaxserve.engine.startup.blueprint import Programs
from jaxserve.engine.startup.choices.engine_choices import choose
from jaxserve.engine.stats import Observer, StepStats
from jaxserve.engine.text.detokenizer import load_tokenizer
from jaxserve.machine import machine, versions
from jaxserve.sched.cost.cost_model import Coefficients, LinearCostModel
from jaxserve.sched.cost.profiles import System
from jaxserve.sched.request import Request, SamplingParams

CONTEXTS, ROWS = (1024, 16384, 131072), (1, 32)
BLOCK_SIZE, CHUNK = 16, 512
MEASURED = 64  # steps that decode
LAST = 32  # the last of these, and of the chunks, count
VOCAB, WORD, END = 1000, 7, 2
KINDS = ("decode", "chunk")
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": END,
}
"""A model that is never computed, with small blocks, so that many fit."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses and checks the command line; argparse exits on errors."""
    parser = BenchParser("context", description=__doc__)
    add = parser.add_argument
    add("--policy", default="goodput", help="(%(default)s)")
    for name, default, told in (
        ("contexts", CONTEXTS, "tokens of a request, in all"),
        ("rows", ROWS, "requests that decode together"),
    ):
        add(f"--{name}", default=",".join(map(str, default)), help=f"{told} (%(default)s)")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        parser.check(args)
        for name, least in (("contexts", 2 * MEASURED), ("rows", 1)):
            values = [int(number) for number in getattr(args, name).split(",")]
            if min(values) < least:
                raise ValueError(f"--{name} must be at least {least}, got {min(values)}")
            setattr(args, name, values)
    except ValueError as error:
        parser.error(str(error))
    return args


def show(args: argparse.Namespace) -> int:
    """Measures and prints; returns the exit code."""
    result = measure(args.policy, args.contexts, args.rows)
    report = {"command": "context", "host": result, "machine": machine(), "versions": versions()}
    print_result(args, text(result), report)
    return 0


class _NoDevice:
    """An `Executor` that computes nothing. sent: int32 numbers by step."""

    copies_beside, intact = False, True

    def __init__(self, buckets: Buckets) -> None:
        self.buckets = buckets
        self.sent: list[int] = []

    def admit(self, slot: int, params: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def submit(self, layout: Layout, packed: np.ndarray, **_: Any) -> _Done:
        self.sent.append(len(packed))
        tokens: Any = np.full(layout.rows, WORD, np.int32)
        return _Done(SampleResult(tokens, None, None, None))


@dataclasses.dataclass(frozen=True)
class _Done:
    """A step that has ended."""

    tokens: SampleResult

    def result(self) -> SampleResult:
        return self.tokens


class _Steps(Observer):
    def __init__(self) -> None:
        self.told: list[StepStats] = []

    def on_step(self, stats: StepStats) -> None:
        self.told.append(stats)


def measure(policy: str, contexts: Sequence[int], rows: Sequence[int]) -> list[dict[str, Any]]:
    """One dict for each number of rows and context: `rows`, `context`, and for each of KINDS
    `KIND_ms`, the host time of a step, and `KIND_sent`."""
    with tempfile.TemporaryDirectory() as folder:
        longest = max(contexts)
        return [_one(Path(folder), policy, n, c, longest) for n in rows for c in contexts]


def _one(folder: Path, policy: str, rows: int, context: int, longest: int) -> dict[str, Any]:
    engine, device = engine_without_device(folder, policy, rows, longest)
    steps, tokens = _Steps(), np.random.default_rng(0).integers(WORD, VOCAB, context - MEASURED)
    engine.add_observer(steps)
    engine.start()
    try:
        serve(engine, tokens.tolist(), 1, 1)
        serve(engine, tokens.tolist(), rows, MEASURED)
    finally:
        engine.stop()
    steps_sent = list(zip(steps.told, device.sent, strict=True))
    row: dict[str, Any] = {"rows": rows, "context": context}
    for kind, counted in zip(
        KINDS,
        (
            [pair for pair in steps_sent if pair[0].num_decodes == rows == pair[0].num_rows],
            [pair for pair in steps_sent if pair[0].num_prefill_tokens == CHUNK],
        ),
        strict=True,
    ):
        last = counted[-LAST:]
        times = [step.host_time for step, _ in last]
        row[f"{kind}_ms"] = round(1e3 * statistics.median(times), 3) if last else None
        row[f"{kind}_sent"] = max((sent for _, sent in last), default=None)
    return row


def serve(engine: Engine, prompt: Sequence[int], rows: int, max_tokens: int) -> None:
    """Serves requests to their ends.

    Args:
        engine: A running engine.
        prompt: The prompt of all requests.
        rows: Number of requests.
        max_tokens: Output tokens of each.
    """
    ended = threading.Semaphore(0)

    def on_output(output: Output) -> None:
        if output.finish_reason is not None:
            ended.release()

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    for _ in range(rows):  # new ids: the engine may still know a request just after its end
        engine.submit(Request(uuid.uuid4().hex, tuple(prompt), sampling), on_output)
    for _ in range(rows):
        ended.acquire()


def engine_without_device(
    folder: Path, policy: str, rows: int, longest: int
) -> tuple[Engine, _NoDevice]:
    """An engine, not started, built as by `build_engine`, except device and weights.

    Args:
        folder: Folder for its files.
        policy: The scheduling policy.
        rows: Most requests that decode together.
        longest: Tokens of the longest request.
    """
    coefficients = dict.fromkeys(("per_token", "token_bias", "decode_kv"), 1e-6)
    others = ("decode_bias", "per_decode", "prefill_quad", "prefill_bias", "per_prefill")
    priced = Coefficients(**coefficients, **dict.fromkeys((*others, "prefill_m"), 0.0))
    config = Config().with_fields(
        model__path=str(folder),
        model__load_format="random",
        scheduler__policy=policy,
        scheduler__max_rows=max(rows, 8),
        scheduler__max_batch_tokens=CHUNK,
        scheduler__max_prefill_tokens=CHUNK,
        scheduler__max_queue=rows,
        scheduler__profile=str(folder / "profile.json"),
        cache__block_size=BLOCK_SIZE,
        cache__num_blocks=4 * (-(-longest // BLOCK_SIZE) + rows * (MEASURED // BLOCK_SIZE + 2)),
        engine__compilation_cache_dir="",
    )
    model = LinearCostModel(priced, MODEL["num_hidden_layers"])
    System("none", model, kv_tokens=1, rho=0.0).save(folder / "profile.json")
    shape = {**MODEL, "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    chosen = choose(config)
    device = _NoDevice(chosen.memory.buckets)
    tokenizer = load_tokenizer(None, chosen.kernels.model.config.vocab_size)
    programs = Programs(device)  # type: ignore[arg-type]
    return assemble(config, chosen, programs, tokenizer), device


def text(result: Sequence[dict[str, Any]]) -> str:
    """The figures as a table."""
    head = f"{'rows':>6}{'context':>9}" + "".join(f"{k + ' ms':>11}{'sent':>9}" for k in KINDS)
    lines = [head]
    for row in result:
        cells = "".join(f"{row[f'{k}_ms'] or 0:>11.3f}{row[f'{k}_sent'] or 0:>9}" for k in KINDS)
        lines.append(f"{row['rows']:>6}{row['context']:>9}{cells}")
    return "\n".join(lines)
