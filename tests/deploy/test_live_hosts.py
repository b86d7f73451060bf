"""A replica of two processes on a Ray cluster of this machine, of which one is killed: a minute."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from jaxserve.deploy.local.cluster import Cluster, local_cluster
from jaxserve.deploy.settings import Settings
from jaxserve.experiments.scale_live.live import FLAGS, MODEL, TOKENS
from jaxserve.experiments.scale_live.streams import Stream, client, many, stream

pytestmark = pytest.mark.ray

STREAMS, BEGUN = 40, 8


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
            return await many(api, MODEL, TOKENS, STREAMS, BEGUN, kill)

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
