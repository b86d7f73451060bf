"""Talks to a jaxserve server: `Client` for programs, and a command line.

jaxserve complete "Once upon a time"
jaxserve complete --file prompts.txt --max_tokens 64 --out answers.jsonl
jaxserve batch prompts.jsonl --out results.jsonl
"""

from jaxserve.client.client import DEFAULT_ADDRESS, Call, Client, Completion
from jaxserve.client.connection import Tls
from jaxserve.client.errors import ServerError, Unreachable
from jaxserve.client.messages import TIERS, make_line, make_request

__all__ = [
    "DEFAULT_ADDRESS",
    "TIERS",
    "Call",
    "Client",
    "Completion",
    "ServerError",
    "Tls",
    "Unreachable",
    "make_line",
    "make_request",
]
