"""Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from jaxserve.server.server import Server


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    url = f"http://{server.http_address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client
