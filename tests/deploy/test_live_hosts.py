"""Two processes on a Ray cluster of this machine: one replica, of which one process is killed; and
two, each with prefixes of its own. Two minutes."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from jaxserve.deploy.local.cluster import Cluster, local_cluster
from jaxserve.deploy.settings import Settings
from jaxserve_lab.experiments.scale_live.live import FLAGS, TOKENS
from jaxserve_lab.experiments.scale_live.streams import MODEL, Stream, client, many, stream

pytestmark = pytest.mark.ray

STREAMS, BEGUN = 40, 8
CACHING = ["--config.cache.prefix_caching", "--config.scheduler.policy=sarathi"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with local_cluster(cpus=2) as running:
        yield running


def settings(hosts: int) -> Settings:
    flags = [*FLAGS, "--config.mesh.tensor=2"] if hosts == 2 else list(FLAGS)
    return Settings(replicas=1, hosts=hosts, flags=flags, num_cpus=0.5)


def one(cluster: Cluster) -> Stream:
    async def ask() -> Stream:
        async with client(cluster.http) as api:
            return await stream(api, MODEL, TOKENS)

    return asyncio.run(ask())


def processes(cluster: Cluster) -> set[int]:
    return {*cluster.processes(), *cluster.followers()}


def test_a_group_writes_what_one_process_does_and_comes_again_where_a_host_dies(
    cluster: Cluster,
) -> None:
    cluster.deploy(settings(hosts=2))
    text = one(cluster).text
    group = processes(cluster)
    (follower,) = cluster.followers()
    assert text and len(group) == 2

    async def streams() -> list[Stream]:
        async with client(cluster.http) as api:
            kill = lambda: os.kill(follower, signal.SIGKILL)  # noqa: E731
            ask = functools.partial(stream, api, MODEL, TOKENS)
            return await many([ask] * STREAMS, BEGUN, kill)

    for each in asyncio.run(streams()):
        assert text.startswith(each.text), each
        assert "unavailable" in each.error or each.text == text, each
    cluster.wait(lambda: one(cluster).text == text, "the group serves again")
    cluster.wait(lambda: not group & processes(cluster), "nothing is left of the old group")
    again = processes(cluster)
    assert len(again) == 2

    cluster.deploy(settings(hosts=1))  # the group lets its calls end, and ends
    assert one(cluster).text == text
    cluster.wait(lambda: not again & processes(cluster), "it is gone")
    assert not cluster.followers() and len(cluster.processes()) == 1


def found(http: str, **body: object) -> int:
    """Asks for a token of a completion. Returns how many tokens of the prompt were in a cache."""
    asked = urllib.request.Request(
        f"{http}/completions", json.dumps(body | {"max_tokens": 1}).encode()
    )
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_goes_where_its_beginning_is(cluster: Cluster) -> None:
    cluster.deploy(Settings(replicas=2, flags=CACHING, num_cpus=1, snapshot_s=0.2))
    prompts = [[number, *range(10, 90)] for number in range(3, 7)]
    for prompt in prompts:
        assert found(cluster.http, prompt=prompt, prompt_cache_key=f"mine-{prompt[0]}") == 0
    # Each replica may have some of them. By its key, or by itself, each goes where it is.
    for prompt in prompts * 3:
        assert found(cluster.http, prompt=prompt, prompt_cache_key=f"mine-{prompt[0]}") == 80
        assert found(cluster.http, prompt=prompt[:40]) == 32
    # Who has another salt finds nothing anywhere.
    assert found(cluster.http, prompt=prompts[0], cache_salt="other") == 0
