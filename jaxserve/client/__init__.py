"""Talks to a jaxserve server: `Client` for programs, and a command line.

python -m jaxserve.client "Once upon a time"
python -m jaxserve.client --file prompts.txt --max_tokens 64 > answers.jsonl
"""

from jaxserve.client.client import (
    DEFAULT_ADDRESS,
    TIERS,
    Client,
    Completion,
    Generation,
    ServerError,
    Unreachable,
    make_request,
)

__all__ = [
    "DEFAULT_ADDRESS",
    "TIERS",
    "Client",
    "Completion",
    "Generation",
    "ServerError",
    "Unreachable",
    "make_request",
]
