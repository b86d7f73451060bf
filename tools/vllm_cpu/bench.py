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

OPT_125M: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": 50272,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}
QWEN_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "float32",
}
SHAPES = {"opt-125m": OPT_125M, "qwen2.5-0.5b": QWEN_05B}


def cpu_settings() -> dict[str, str]:
    """The variables vLLM reads at import, with what suits a measurement; the caller's win.

    All cores compute: "auto" would keep one for a front end, which this run has no use for.
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
    """The workload: numbers and lengths as in `jaxserve.bench`. Exits with 2 for a wrong one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tuple(SHAPES), default="opt-125m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num_requests", type=int, default=32)
    parser.add_argument("--input_len", type=int, default=128)
    parser.add_argument("--output_len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_model_len", type=int, default=512)
    args = parser.parse_args(argv)
    for name in ("num_requests", "input_len", "output_len", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


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
            "num_requests": args.num_requests,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "repeats": args.repeats,
            "seed": args.seed,
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
    start. RuntimeError if a request did not get all of its tokens."""
    import numpy as np
    import vllm

    shape = SHAPES[args.model]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
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
            ids = rng.integers(0, shape["vocab_size"], (count, args.input_len)).tolist()
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
