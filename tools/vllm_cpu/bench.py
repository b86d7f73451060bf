"""Times vLLM's CPU build on a model's shapes with random weights, as one line of JSON.

    VENV/bin/python tools/vllm_cpu/bench.py --dtype=float32

VENV is what setup.sh made; jaxserve is not needed in it. The workload is that of
`jaxserve bench throughput` and `latency`: random token ids, greedy, end of sequence
ignored, one warm-up run, then the repeats. Nothing is downloaded. vLLM may log after that line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workload

ARCHITECTURES = {"opt": "OPTForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def shape(model: str) -> dict[str, Any]:
    """The config.json of a model, as in jaxserve's preset."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # jaxserve need not be installed
    from jaxserve.models.presets import preset

    config = preset(model)
    return {**config, "architectures": [ARCHITECTURES[config["model_type"]]]}


def cpu_settings() -> dict[str, str]:
    """The variables that vLLM reads at import, set for measuring; the caller's take precedence.

    All cores compute: "auto" would reserve one for a front end, which is not used here.
    """
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    settings = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**settings, "LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the workload. Exits with 2 on errors."""
    parser = workload.parser(__doc__, 3)
    parser.add_argument("--dtype", choices=workload.DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_model_len", type=int, default=512)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one data type."""
    settings = cpu_settings()
    os.environ.update(settings)
    # vLLM reads the settings when it is imported.
    import torch
    import vllm

    batch, single, start_s = measure(args)
    return {
        "command": "vllm",
        "model": args.model,
        "dtype": args.dtype,
        "workload": {
            name: getattr(args, name)
            for name in ("num_requests", "input_len", "output_len", "repeats", "seed")
        },
        "results": {
            "batch": rates(batch, args.num_requests * args.output_len),
            "single": rates(single, args.output_len),
            "start_s": start_s,
        },
        "settings": settings,
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def measure(args: argparse.Namespace) -> tuple[list[float], list[float], float]:
    """Seconds of every repeat with all requests at once, of every repeat with one, and of vLLM's
    start. Raises RuntimeError if a request did not get all of its tokens."""
    import numpy as np
    import vllm

    config = shape(args.model)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        begin = time.perf_counter()
        engine = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=max(args.num_requests, 32),
            enable_prefix_caching=False,
            seed=args.seed,
            disable_log_stats=True,
        )
        start_s = time.perf_counter() - begin
        rng = np.random.default_rng(args.seed)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False
        )

        def timed(count: int) -> float:
            """Seconds for `count` new random prompts."""
            ids = rng.integers(0, config["vocab_size"], (count, args.input_len)).tolist()
            prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in ids]
            begin = time.perf_counter()
            results = engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            made = [len(result.outputs[0].token_ids) for result in results]
            if made != [args.output_len] * count:
                raise RuntimeError(f"vLLM made {made} tokens, not {args.output_len} each")
            return seconds

        timed(args.num_requests)
        batch = [timed(args.num_requests) for _ in range(args.repeats)]
        timed(1)
        single = [timed(1) for _ in range(args.repeats)]
    return batch, single, start_s


def rates(seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """Output tokens per second of every run, and their median."""
    values = [tokens / s for s in seconds]
    return {
        "output_tokens_per_s": {"median": statistics.median(values), "values": values},
        "seconds": list(seconds),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the line; returns the exit status."""
    result = run(parse(argv))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
