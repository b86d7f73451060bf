"""Times jaxserve as users start it, with `LLM(...)`: a child of side_by_side.py, in jaxserve's
environment."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from measures import MAX_LEN, MEASURES, TYPES, serve

from jaxserve import LLM, SamplingParams, __version__
from jaxserve.models.presets import preset


def measure(llm: LLM, rng: np.random.Generator, name: str) -> float:
    """Tokens/s, as in `measures.MEASURES`. Raises RuntimeError if a request gets too few tokens."""
    shape = MEASURES[name]
    vocab = llm.engine.info().vocab_size
    prompts = rng.integers(3, vocab, (shape.streams, shape.prompt)).tolist()
    sampling = SamplingParams(max_tokens=shape.output, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    if name == "decode":
        made, first = 0, 0
        for piece in llm.stream(prompts[0], sampling):
            if not made:
                begin, first = time.perf_counter(), len(piece.token_ids)
            made += len(piece.token_ids)
        lengths, tokens = [made], made - first
    else:
        answers = llm.generate(prompts, sampling, progress=False)
        lengths = [len(answer.outputs[0].token_ids) for answer in answers]
        tokens = shape.prompt * shape.streams + (0 if name == "prefill" else sum(lengths))
    seconds = time.perf_counter() - begin
    if lengths != [shape.output] * shape.streams:
        raise RuntimeError(f"jaxserve made {lengths} tokens, not {shape.output} each")
    return tokens / seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--file", help="GGUF file")
    group.add_argument("--random", metavar="PRESET")
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--measures", required=True, help="names, by commas")
    args = parser.parse_args(argv)
    fields: dict[str, Any] = {"engine__max_model_len": MAX_LEN, **TYPES[args.type].fields}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = args.file or folder
        if args.random:
            config = Path(folder, "config.json")
            config.write_text(json.dumps(preset(args.random)), encoding="utf-8")
            fields["model__load_format"] = "random"
        with LLM(model, **fields) as llm:
            rng = np.random.default_rng(0)
            about = {
                "jaxserve": __version__,
                "jax": jax.__version__,
                "dtype": llm.engine.info().dtype,
                "start_s": time.perf_counter() - begin,
            }
            for name in args.measures.split(","):
                measure(llm, rng, name)
            serve(lambda name: measure(llm, rng, name), about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
