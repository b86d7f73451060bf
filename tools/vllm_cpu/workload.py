"""The flags that the scripts of the comparison share: a model and its requests."""

from __future__ import annotations

import argparse

MODELS = ("opt-125m", "qwen2.5-0.5b")
DTYPES = ("float32", "bfloat16")


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Numbers and lengths as in `jaxserve.bench`. It exits with 2 for a wrong one.

    Args:
        description: The script's docstring.
        repeats: Measured runs, by default.
    """
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--model", choices=MODELS, default=MODELS[0])
    sizes = {"num_requests": 32, "input_len": 128, "output_len": 64, "repeats": repeats}
    for name, default in sizes.items():
        made.add_argument(f"--{name}", type=at_least_one, default=default)
    return made


def at_least_one(text: str) -> int:
    """A whole number for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)
