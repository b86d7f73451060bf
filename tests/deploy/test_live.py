"""A Ray cluster on this machine, with processes that die: minutes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import asdict

import pytest

from jaxserve.client import Client, ServerError
from jaxserve.deploy.local.cluster import Cluster
from jaxserve_lab.experiments.scale_live.live import (
    LONG,
    STREAMS,
    Found,
    lines,
    measure,
)
from jaxserve_lab.experiments.scale_live.streams import MODEL, metric

pytestmark = pytest.mark.ray


def hang_up(cluster: Cluster, client: Client) -> None:
    """Clients that go in the middle of seconds of work, at either door."""
    options = {"max_tokens": 200, "ignore_eos": True}
    calls = [client.generate("Once upon a time", n=16, timeout=60, **options) for _ in range(4)]
    assert next(calls[0])
    for call in calls:
        call.cancel()
    let_go(cluster, 0)

    body = json.dumps({"prompt": ["Once upon a time"] * 64, "stream": True, **options}).encode()
    request = urllib.request.Request(f"{cluster.http}/completions", body)
    request.add_header("Content-Type", "application/json")
    before = aborted(cluster)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.readline().startswith(b"data: ")
    let_go(cluster, before)


def aborted(cluster: Cluster) -> float:
    return metric(cluster, "request_success_total", finished_reason="abort")


def let_go(cluster: Cluster, before: float) -> None:
    """Of what nobody waits for."""
    cluster.wait(lambda: not metric(cluster, "num_requests"), "the engine has nothing to do", 60)
    assert aborted(cluster) > before


def look(cluster: Cluster) -> None:
    """The gRPC proxy, and errors at both."""
    with Client(cluster.grpc) as client:
        assert client.info(timeout=60).model == MODEL
        (one,) = client.complete("Once upon a time", max_tokens=8, temperature=0.0, timeout=60)
        assert len(one.token_ids) == 8 and one.text
        with pytest.raises(ServerError, match="max_tokens: must be at least 1"):
            client.complete("Once", max_tokens=-1, timeout=60)
        assert metric(cluster, "generation_tokens_total") == 8
        hang_up(cluster, client)
    body = json.dumps({"prompt": "Once", "nonsense": 1}).encode()
    request = urllib.request.Request(f"{cluster.http}/completions", body)
    request.add_header("Content-Type", "application/json")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert json.load(refused.value)["error"]["param"] == "nonsense"


@pytest.fixture(scope="module")
def found() -> Found:
    result = measure(look, kills=4, roles=["1:1"])
    print("\n" + "\n".join(lines(result)))
    print(json.dumps(asdict(result)))
    return result


def test_no_call_fails_while_replicas_come_and_go(found: Found) -> None:
    for scaled in (found.up, found.down):
        assert scaled.calls and not scaled.failed and not scaled.wrong


def test_a_replica_that_is_removed_is_done_soon(found: Found) -> None:
    """However long its answers are: others go on with them, and nobody misses a word."""
    drained = found.drained
    assert (drained.whole, drained.failed, drained.wrong) == (LONG, 0, 0)
    assert drained.moved > 0 and drained.seconds < drained.longest


def test_no_stream_is_lost_with_a_replica(found: Found) -> None:
    """What had begun there goes on elsewhere, and nobody misses a word, or hears one twice."""
    killed = found.killed
    assert (killed.whole, killed.cut, killed.failed, killed.wrong) == (STREAMS, 0, 0, 0)
    assert 0 < killed.moved < STREAMS


def test_a_replica_that_says_nothing_is_left(found: Found) -> None:
    """Its process is stopped, but not its connections."""
    frozen = found.frozen
    assert (frozen.whole, frozen.cut, frozen.failed, frozen.wrong) == (STREAMS, 0, 0, 0)
    assert 0 < frozen.moved < STREAMS


def test_prompts_apart_from_decodes_say_the_same(found: Found) -> None:
    apart = found.apart
    assert (apart.whole, apart.wrong) == (apart.streams, 0) and apart.moved >= apart.streams / 2


def test_either_side_of_a_move_may_be_killed(found: Found) -> None:
    """No stream ends early or says anything twice, and nothing is kept of those that moved."""
    faults = found.faults
    assert (faults.whole, faults.wrong, faults.left) == (faults.streams, 0, 0), faults
    assert faults.moves >= faults.streams / 4


def test_caches_are_sent_ahead(found: Found) -> None:
    """Streams go on meanwhile, and behind what they have cached where they go; nobody loses a word
    with a replica."""
    ahead = found.ahead
    assert (ahead.whole, ahead.wrong) == (ahead.requests, 0), ahead
    assert 0 < ahead.moved < ahead.requests and ahead.cached >= ahead.moved / 2
    assert ahead.moved / 2 <= ahead.sent, ahead
    asked = ahead.kills * ahead.requests
    assert (ahead.killed_whole, ahead.killed_wrong) == (asked, 0) and asked, ahead


def test_a_simulation_moves_the_same_requests(found: Found) -> None:
    (agreed,) = found.agreed
    assert agreed.simulated == agreed.requests, agreed
    assert agreed.live >= agreed.requests / 2, agreed  # those that have not ended before they can
