"""Talks to a jaxserve server: `Client` for programs, and a command line.

jaxserve complete "Once upon a time"
jaxserve complete --file prompts.txt --max_tokens 64 --out answers.jsonl
jaxserve batch prompts.jsonl --out results.jsonl
"""

from jaxserve.client.client import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from jaxserve.client.client import Call as Call
from jaxserve.client.client import Client as Client
from jaxserve.client.client import Completion as Completion
from jaxserve.client.client import Embedding as Embedding
from jaxserve.client.connection import Tls as Tls
from jaxserve.client.errors import ServerError as ServerError
from jaxserve.client.errors import Unreachable as Unreachable
from jaxserve.client.messages import TIERS as TIERS
from jaxserve.client.messages import make_embed_request as make_embed_request
from jaxserve.client.messages import make_line as make_line
from jaxserve.client.messages import make_request as make_request
from jaxserve.client.messages import make_score_request as make_score_request
