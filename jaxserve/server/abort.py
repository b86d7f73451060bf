"""Ends an RPC with an error."""

from __future__ import annotations

from typing import NoReturn

import grpc


async def abort(context: grpc.aio.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    """Raises what ends the call with that status; details are for a person."""
    await context.abort(code, details)
    raise AssertionError("abort returned")  # abort always raises; this tells the type checker
