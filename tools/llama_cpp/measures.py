"""The measures of both sides, and how a child process is asked for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MODELS = ("smollm2", "qwen2.5-0.5b")
MAX_LEN = 8192  # tokens of a request, SmolLM2's context


class Type(NamedTuple):
    """Weights of equal bits on both sides.

    Attributes:
        gguf: Llama.cpp's name for them.
        ftype: Its number for `llama_model_quantize`.
        fields: Fields of `LLM`.
    """

    gguf: str
    ftype: int
    fields: Mapping[str, str]


TYPES = {
    "float32": Type("F32", 0, {"model__dtype": "float32"}),
    "bfloat16": Type("BF16", 32, {"model__dtype": "bfloat16"}),
    "int8": Type("Q8_0", 7, {"model__quantization": "int8"}),
    "int4": Type("Q4_0", 2, {"model__quantization": "int4:group=32"}),
    "int4-zero": Type("Q4_1", 3, {"model__quantization": "int4:group=32,zero"}),
}
"""The widest first."""


class Shape(NamedTuple):
    """Simultaneous requests.

    Attributes:
        streams: Their number.
        prompt: Prompt tokens, random.
        output: Output tokens, greedy.
    """

    streams: int
    prompt: int
    output: int


MEASURES = {"decode": Shape(1, 64, 128), "prefill": Shape(1, 512, 1), "streams": Shape(16, 64, 32)}
"""In tokens/s: for "decode" tokens after the first, over the time since the first; for "prefill"
the prompt's tokens, until the first output; for "streams" prompt and output tokens, over the whole
time."""


def serve(measure: Callable[[str], Any], about: Mapping[str, Any]) -> None:
    """Answers each line of stdin, the name of a measure, by a line of JSON with its tokens/s. First
    writes a description of the process."""
    answers, sys.stdout = sys.stdout, sys.stderr  # other output goes to stderr
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), file=answers, flush=True)
