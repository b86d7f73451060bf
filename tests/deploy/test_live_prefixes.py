"""Two replicas on a Ray cluster of this machine: a prompt goes where its beginning is. A minute."""

from __future__ import annotations

import json
import urllib.request

import pytest

from jaxserve.client import Client
from jaxserve.deploy.local.cluster import local_cluster
from jaxserve.deploy.settings import Settings

pytestmark = pytest.mark.ray
CACHING = ["--config.cache.prefix_caching", "--config.scheduler.policy=sarathi"]


def found(http: str, **body: object) -> int:
    """Asks for a token of a completion. Returns how many tokens of the prompt were in a cache."""
    asked = urllib.request.Request(
        f"{http}/completions", json.dumps(body | {"max_tokens": 1}).encode()
    )
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_goes_where_its_beginning_is() -> None:
    with local_cluster(cpus=2) as cluster:
        cluster.deploy(Settings(replicas=2, flags=CACHING, num_cpus=1, snapshot_s=0.2))
        prompts = [[number, *range(10, 90)] for number in range(3, 7)]
        with Client(cluster.grpc) as client:
            # One replica is busy, so these go to the other.
            busy = client.generate("Once", n=16, max_tokens=200, ignore_eos=True, timeout=60)
            next(busy)
            for prompt in prompts:
                assert found(cluster.http, prompt=prompt) == 0
            busy.cancel()
        # Which has them, though both have nothing to do now.
        for prompt in prompts * 3:
            assert found(cluster.http, prompt=prompt, prompt_cache_key="mine") == 80
            assert found(cluster.http, prompt=prompt[:40]) == 32
        # Who has another salt finds nothing anywhere.
        assert found(cluster.http, prompt=prompts[0], cache_salt="other") == 0
