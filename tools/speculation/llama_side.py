"""Times llama.cpp with and without its lookup decoding: a child of compare.py, in the environment
of tools/llama_cpp/setup.sh. One request at a time, since lookup decoding supports no more."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from measures import serve
from prompts import ASKED, MAX_TOKENS

LENGTHS = (2, 4, 7, 10)  # draft lengths that are tried


def model(path: str, length: int) -> llama_cpp.Llama:
    """A llama.cpp model that drafts this many tokens; none with 0."""
    threads = len(os.sched_getaffinity(0))
    draft = LlamaPromptLookupDecoding(num_pred_tokens=length) if length else None
    options = {"n_threads": threads, "n_threads_batch": threads, "flash_attn": True}
    return llama_cpp.Llama(path, n_ctx=1024, draft_model=draft, verbose=False, **options)


def ask(llm: llama_cpp.Llama, name: str) -> dict[str, float]:
    """Tokens/s of a measure."""
    begin, made = time.perf_counter(), 0
    for text in ASKED[name]:
        llm.reset()
        answer = llm.create_chat_completion(
            [{"role": "user", "content": text}], temperature=0.0, max_tokens=MAX_TOKENS
        )
        made += answer["usage"]["completion_tokens"]
    return {"rate": made / (time.perf_counter() - begin), "tokens": made}


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--drafts", action="store_true", help="with the length that is fastest")
    args = parser.parse_args(argv)
    length, best = 0, 0.0
    for tried in LENGTHS if args.drafts else ():
        rate = ask(model(args.model, tried), "copies")["rate"]
        if rate > best:
            length, best = tried, rate
    llm = model(args.model, length)
    ask(llm, "new")
    serve(lambda name: ask(llm, name), {"llama": llama_cpp.__version__, "length": length})
    return 0


if __name__ == "__main__":
    sys.exit(main())
