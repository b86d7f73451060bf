"""What both sides of the comparison measure, and how a child process is asked for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MODELS = ("smollm2", "qwen2.5-0.5b")
MAX_LEN = 8192  # tokens of a request, as SmolLM2 has it


class Type(NamedTuple):
    """Weights of equal bits on both sides.

    Attributes:
        gguf: llama.cpp's name of them.
        ftype: its number for `llama_model_quantize`.
        fields: of `LLM`.
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
    """Requests that are made at once.

    Attributes:
        streams: how many.
        prompt: tokens in, random ones.
        output: tokens out, the likeliest.
    """

    streams: int
    prompt: int
    output: int


MEASURES = {"decode": Shape(1, 64, 128), "prefill": Shape(1, 512, 1), "streams": Shape(16, 64, 32)}
"""In tokens/s: of "decode" those after the first, over the time since the first; of "prefill" the
prompt's, until the first is out; of "streams" those in and out, over the whole time."""


def serve(measure: Callable[[str], Any], about: Mapping[str, Any]) -> None:
    """Answers each line of stdin, the name of a measure, by a line of JSON with its tokens/s. Says
    first what the process is."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(line.strip())), file=answers, flush=True)
