"""Times llama.cpp on one GGUF file: a child of side_by_side.py, in setup.sh's environment.

For each measure all settings are tried, and the fastest are used: threads, flash attention, the
size of physical batches, a shared cache or one per stream. Tokens are chosen from the logits in
NumPy, which is faster than llama.cpp's sampler.
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
ROOM = 8  # spare tokens of the cache


class Context:
    """A context of llama.cpp for several requests.

    Args:
        model: A result of `llama_model_load_from_file`.
        shape: The requests to measure.
        settings: Fields of `llama_context_params`.
        every: Whether there are logits of all prompt tokens.
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
        """Serves all requests once. Returns the seconds to the first tokens, and from then to the
        end."""
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
        """A batch with this many tokens per stream, with logits of the last one or of all."""
        batch = llama_cpp.llama_batch_init(self._shape.streams * count, 0, 1)
        batch.n_tokens = self._shape.streams * count
        for i in range(batch.n_tokens):
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i // count
            batch.logits[i] = every or i % count == count - 1
        return batch

    def logits(self, prompt: np.ndarray) -> np.ndarray:
        """Logits after each token of one prompt: a view of float32 [n, vocabulary]."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._ctx), False)
        return self._decode(self._prompts, prompt[None], 0, prompt.size)

    def _decode(self, batch: Any, tokens: np.ndarray, first: int, rows: int) -> np.ndarray:
        """Feeds tokens [streams, n] at positions from `first` on; returns the rows of logits."""
        as_array = np.ctypeslib.as_array
        as_array(batch.token, tokens.shape)[:] = tokens
        as_array(batch.pos, tokens.shape)[:] = np.arange(first, first + tokens.shape[1])
        if llama_cpp.llama_decode(self._ctx, batch):
            raise RuntimeError("llama_decode failed")
        return as_array(llama_cpp.llama_get_logits(self._ctx), (rows, self._vocab))

    def close(self) -> None:
        """Frees the context."""
        llama_cpp.llama_batch_free(self._prompts)
        llama_cpp.llama_batch_free(self._newest)
        llama_cpp.llama_free(self._ctx)


def rate(name: str, first: float, rest: float) -> float:
    """Tokens/s of a measure, as in `measures.MEASURES`."""
    shape = MEASURES[name]
    if name == "prefill":
        return shape.prompt / first
    if name == "decode":
        return (shape.output - 1) / rest
    return shape.streams * (shape.prompt + shape.output) / (first + rest)


def settings(name: str) -> list[dict[str, int]]:
    """The settings to try for a measure. Few tokens may be faster on one thread; prompts never
    are."""
    cores = len(os.sched_getaffinity(0))
    several = {
        "decode": {"n_threads": (1, cores)},
        "prefill": {"n_ubatch": (256, 512)},
        "streams": {"kv_unified": (False, True)},
    }
    usual = {"n_threads": (cores,), "n_threads_batch": (cores,), "flash_attn_type": (0, 1)}
    tried = {**usual, **several[name]}
    return [dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values())]


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
    """A model of llama.cpp from a GGUF file. Raises RuntimeError if it does not load."""
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
    """Logs errors only."""
    if level == ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
