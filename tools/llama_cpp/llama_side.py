"""Times llama.cpp on one GGUF file: a child of side_by_side.py, in setup.sh's environment.

Of each measure all settings are tried, and the fastest is taken: threads, flash attention, the size
of physical batches, one cache for all streams or one each. Tokens are chosen by their logits, in
NumPy: faster than llama.cpp's sampler.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from measures import MEASURES, Shape, serve

ERROR = 4  # of ggml's log levels
ROOM = 8  # tokens of the cache beside those of the requests


class Context:
    """llama.cpp's context for so many requests.

    Args:
        model: of `llama_model_load_from_file`.
        shape: what it is to measure.
        settings: fields of `llama_context_params`.
        every: there are logits of all tokens of a prompt.
    """

    def __init__(
        self, model: Any, shape: Shape, settings: dict[str, int], *, every: bool = False
    ) -> None:
        params = llama_cpp.llama_context_default_params()
        tokens = shape.streams * shape.prompt
        params.n_ctx = shape.streams * (shape.prompt + shape.output + ROOM)
        params.n_batch, params.n_seq_max, params.no_perf = tokens, shape.streams, True
        for name, value in settings.items():
            setattr(params, name, value)
        self._ctx = llama_cpp.llama_init_from_model(model, params)
        if not self._ctx:
            raise RuntimeError(f"llama.cpp makes no context with {settings}")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self._shape, self._rng = shape, np.random.default_rng(0)
        self._prompts, self._newest = self._batch(shape.prompt, every), self._batch(1, True)

    def seconds(self) -> tuple[float, float]:
        """Serves all requests once: until each has its first token, and from then to the end."""
        shape = self._shape
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        prompts = self._rng.integers(3, self._vocab, (shape.streams, shape.prompt))
        begin = time.perf_counter()
        newest = self._decode(self._prompts, prompts, 0, shape.streams).argmax(axis=1)
        middle = time.perf_counter()
        for position in range(shape.prompt, shape.prompt + shape.output - 1):
            logits = self._decode(self._newest, newest[:, None], position, shape.streams)
            newest = logits.argmax(axis=1)
        return middle - begin, time.perf_counter() - middle

    def _batch(self, count: int, every: bool) -> Any:
        """A batch of so many tokens a stream, of whose last ones there are logits, or of all."""
        batch = llama_cpp.llama_batch_init(self._shape.streams * count, 0, 1)
        batch.n_tokens = self._shape.streams * count
        for i in range(batch.n_tokens):
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // count
            batch.logits[i] = every or i % count == count - 1
        return batch

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        """What is predicted after each token of one prompt: a view of float32 [n, vocabulary]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        return self._decode(self._prompts, prompt[None], 0, prompt.size)

    def _decode(self, batch: Any, tokens: np.ndarray, first: int, rows: int) -> np.ndarray:
        """Feeds tokens [streams, n] at positions from `first` on; the rows of logits."""
        as_array = np.ctypeslib.as_array
        as_array(batch.token, tokens.shape)[:] = tokens
        as_array(batch.pos, tokens.shape)[:] = np.arange(first, first + tokens.shape[1])
        if llama_cpp.llama_decode(self._ctx, batch):
            raise RuntimeError("llama_decode failed")
        return as_array(llama_cpp.llama_get_logits(self._ctx), (rows, self._vocab))

    def close(self) -> None:
        """Frees it."""
        llama_cpp.llama_batch_free(self._prompts)
        llama_cpp.llama_batch_free(self._newest)
        llama_cpp.llama_free(self._ctx)


def rate(name: str, first: float, rest: float) -> float:
    """Tokens/s of a measure, as `measures.MEASURES` has it."""
    shape = MEASURES[name]
    if name == "prefill":
        return shape.prompt / first
    if name == "decode":
        return (shape.output - 1) / rest
    return shape.streams * (shape.prompt + shape.output) / (first + rest)


def settings(name: str) -> list[dict[str, int]]:
    """All that are worth a try for a measure. Few tokens may be faster on one thread; prompts never
    are."""
    cores = len(os.sched_getaffinity(0))
    several = {
        "decode": {"n_threads": (1, cores)},
        "prefill": {"n_ubatch": (256, 512)},
        "streams": {"kv_unified": (False, True)},
    }
    usual = {"n_threads": (cores,), "n_threads_batch": (cores,), "flash_attn_type": (0, 1)}
    tried = {**usual, **several[name]}
    return [dict(zip(tried, each, strict=True)) for each in itertools.product(*tried.values())]


def fastest(model: Any, name: str) -> tuple[Context, dict[str, int]]:
    """The context with the settings that make a measure fastest: by the better of two runs."""
    best: tuple[float, Context, dict[str, int]] | None = None
    for chosen in settings(name):
        context = Context(model, MEASURES[name], chosen)
        now = max(rate(name, *context.seconds()) for _ in range(2))
        if best is None or now > best[0]:
            best, context = (now, context, chosen), best[1] if best else None
        if context is not None:
            context.close()
    assert best is not None
    return best[1:]


def load(file: str) -> Any:
    """llama.cpp's model of a GGUF file. RuntimeError if it does not load."""
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(file.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file}")
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Serves measures until stdin ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", required=True, help="GGUF file")
    parser.add_argument("--measures", required=True, help="names, by commas")
    args = parser.parse_args(argv)
    model = load(args.file)
    contexts, chosen = {}, {}
    for name in args.measures.split(","):
        contexts[name], chosen[name] = fastest(model, name)
    about = {
        "llama_cpp_python": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        "settings": chosen,
    }
    serve(lambda name: rate(name, *contexts[name].seconds()), about)
    return 0


@llama_cpp.llama_log_callback
def QUIET(level: int, text: bytes, _: Any) -> None:
    """Errors only."""
    if level == ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
