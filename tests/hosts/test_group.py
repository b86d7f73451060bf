"""Hosts come together, or are told in one line why they do not."""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import pytest

from jaxserve.hosts import group as group_module
from jaxserve.hosts import process_exit
from jaxserve.hosts.callers import MOST
from jaxserve.hosts.channel import Channel, Closed
from jaxserve.hosts.group import HELLO_BYTES, OTHER, Group, gather
from jaxserve.hosts.link import CLOSE, Link
from jaxserve.hosts.membership import join_group
from jaxserve.hosts.messages import Message
from jaxserve.hosts.rank import GroupError, Rank

from .peers import TIMEOUT, Losses, channels, ranks

PROFILE = {"model.path": "there", "mesh.hosts": 3}


def beside(act: Callable[[], Any]) -> Future[Any]:
    """In a thread of its own."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def joining(rank: Rank, profile: dict[str, Any] = PROFILE) -> Future[tuple[Link, str]]:
    return beside(lambda: join_group(rank, profile))


def test_all_come_and_are_told_the_same() -> None:
    leader, *others = ranks(3)
    followers = [joining(rank) for rank in reversed(others)]  # before there is a leader
    group = Group(gather(leader, PROFILE), "here:1")
    found = [each.result(TIMEOUT) for each in followers][::-1]
    assert [address for _, address in found] == ["here:1"] * 2
    for index, (link, _) in enumerate(found, 1):
        link.send(Message("facts", {"index": index}))
    assert [answer.fields["index"] for answer in group.answers()] == [1, 2]
    group.broadcast(Message("call"))
    group.close()
    for link, _ in found:
        assert [link.receive(TIMEOUT).name for _ in range(2)] == ["call", CLOSE]
    assert group.lost(0) is None


def test_where_one_is_lost_all_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, told = Losses(), Losses()
    monkeypatch.setattr(group_module, "end_process", lambda code: ended(str(code)))
    monkeypatch.setattr(group_module, "LAST_S", 0.0)
    leader, *others = ranks(3)
    followers = [joining(rank) for rank in others]
    group = Group(gather(leader, PROFILE), "here:1")
    group.on_loss(told)
    (first, _), (second, _) = (each.result(TIMEOUT) for each in followers)
    heard = Losses()
    second._on_loss = heard
    first._on_loss = Losses()
    first._channel.close()
    assert told.wait() == "host 1 is gone"
    assert "host 1 is gone" in heard.wait()
    assert ended.wait() == "1"
    assert "host 1 is gone" in str(group.lost(0))
    late = Losses()
    group.on_loss(late)
    assert late.wait() == "host 1 is gone"


def test_a_log_that_nobody_reads_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it leave the end to whatever `end_process` is later: once a real one, after this
    test's own, which ended the process that ran the tests."""
    ended, go_on = Losses(), threading.Event()
    monkeypatch.setattr(group_module, "end_process", lambda code: ended(str(code)))
    monkeypatch.setattr(group_module, "LAST_S", 0.0)
    monkeypatch.setattr(group_module.log, "error", lambda *_: go_on.wait(TIMEOUT))
    here, there = channels()
    group = Group({1: here}, "here:1")
    group.on_loss(lambda why: None)
    there.close()
    assert group.lost(TIMEOUT) == "host 1 is gone"
    assert ended.wait() == "1"
    go_on.set()


class Starting:
    """Starts the followers of these indices."""

    def __init__(self, *indices: int) -> None:
        self._indices = indices
        self.joined: list[Future[tuple[Link, str]]] = []

    def start(self, coordinator: str) -> None:
        port = int(coordinator.rpartition(":")[2])
        for index in self._indices:
            self.joined.append(joining(Rank("localhost", port, 3, index, TIMEOUT)))

    def problem(self) -> str | None:
        return None


def test_a_leader_on_any_free_port_may_start_the_others_itself() -> None:
    starting = Starting(1, 2)
    leader = Rank("localhost", 0, 3, 0, TIMEOUT)
    assert list(gather(leader, PROFILE, starting)) == [1, 2] and len(starting.joined) == 2


def test_where_one_cannot_be_started_nobody_waits_for_it() -> None:
    class Failing(Starting):
        looks = 0

        def problem(self) -> str | None:
            self.looks += 1
            return "host 2: no such file" if self.looks == 2 else None

    with pytest.raises(GroupError, match=r"^host 2: no such file$"):
        gather(Rank("localhost", 0, 3, 0, 5.0), PROFILE, Failing())


def test_those_who_have_come_hear_that_another_one_does_not() -> None:
    came = threading.Event()

    class Failing(Starting):
        def problem(self) -> str | None:
            return "host 2: no such file" if came.is_set() else None

    starting = Failing(1)
    leader = Rank("localhost", 0, 3, 0, TIMEOUT)
    with pytest.MonkeyPatch.context() as patch:
        admitted = group_module._admitted
        patch.setattr(group_module, "_admitted", lambda *a: (admitted(*a), came.set())[0])
        with pytest.raises(GroupError, match=r"^host 2: no such file$"):
            gather(leader, PROFILE, starting)
    with pytest.raises(GroupError, match=r"^host 2: no such file$"):
        starting.joined[0].result(TIMEOUT)


def test_one_with_another_configuration_is_refused_and_the_right_one_comes_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The leader's log says where they differ, and the one refused hears no values: it may be
    anybody."""
    leader, right = ranks(2)
    gathered = beside(lambda: gather(leader, PROFILE))
    outside = Rank(right.address, right.port, 5, 4, TIMEOUT)
    for rank, profile, why in (
        (right, {"model.path": "elsewhere"}, "model.path: it has 'elsewhere', the leader 'there'"),
        (right, {"mesh.hosts": 4}, "mesh.hosts: it has 4, the leader 3"),
        (outside, {}, "mesh.host_index must be 1 to 1, got 4"),
        (right, {"mesh.hosts": "x" * 60_000}, "xxx... (60002 characters), the leader 3"),
        (right, {"a" * 60_000: 1}, "aaa: it has 1, the leader None"),
        (right, {"mesh.hosts": 10**400}, "000... (401 characters), the leader 3"),
    ):
        caplog.clear()
        with pytest.raises(GroupError, match=re.escape(OTHER)):
            joining(rank, {**PROFILE, **profile}).result(TIMEOUT)
        (line,) = (each.getMessage() for each in caplog.records if "is refused" in each.message)
        assert line.endswith(why) and len(line) < 300
    joining(right)
    assert list(gathered.result(TIMEOUT)) == [1]


def test_what_is_too_long_or_no_message_leaves_a_short_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leader, right = ranks(2)
    gathered = beside(lambda: gather(leader, PROFILE))
    for sent in (
        struct.pack("!I", HELLO_BYTES + 1),
        struct.pack("!II", 60_004, 60_000) + b'["hello",{},[["%s",[]]]]' % (b"y" * 59_978),
    ):
        stranger = connected(leader, gathered)
        stranger.sendall(sent)
        let_go(stranger)
    lines = [each.getMessage() for each in caplog.records if "not a follower" in each.message]
    assert len(lines) == 2 and max(map(len, lines)) < 200, lines
    joining(right)
    assert list(gathered.result(TIMEOUT)) == [1]


def test_of_two_with_one_index_the_first_is_told() -> None:
    leader, one, _ = ranks(3)
    gathered = beside(lambda: gather(leader, PROFILE))
    both = [joining(one), joining(one)]
    (first, *_), _ = wait(both, TIMEOUT, FIRST_COMPLETED)
    with pytest.raises(GroupError, match=r"mesh\.host_index: another host has come as 1"):
        first.result()
    assert not gathered.done()


def connected(leader: Rank, gathered: Future[Any]) -> socket.socket:
    """To the leader, once it listens."""
    while True:
        try:
            found = socket.create_connection((leader.address, leader.port), TIMEOUT)
        except ConnectionRefusedError:
            assert not gathered.done()
        else:
            found.settimeout(TIMEOUT)
            return found


def let_go(stranger: socket.socket) -> None:
    """Without an answer."""
    with stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""


def test_whoever_else_connects_is_let_go() -> None:
    leader, right = ranks(2)
    gathered = beside(lambda: gather(leader, PROFILE))
    stranger = connected(leader, gathered)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    let_go(stranger)
    wrong: list[dict[str, Any]] = [
        {"index": index, "profile": profile}
        for index, profile in (("one", PROFILE), (math.inf, PROFILE), (True, PROFILE), (1, [[1]]))
    ]
    for fields in ({"index": 1}, *wrong):
        with connected(leader, gathered) as other:
            channel = Channel(other, TIMEOUT)
            channel.send(Message("hello", fields))
            with pytest.raises(Closed):
                channel.receive(TIMEOUT)
    joining(right)
    assert list(gathered.result(TIMEOUT)) == [1]


def test_those_who_say_nothing_hold_nobody_up() -> None:
    """13 took longer than the leader waits, one after the other: 5 s each, of its 60."""
    leader, *others = ranks(3)
    gathered = beside(lambda: gather(leader, PROFILE))
    silent = [connected(leader, gathered) for _ in range(MOST + 20)]
    for one in silent[::2]:
        one.sendall(b"\x10")
    began = time.monotonic()
    followers = [joining(rank) for rank in others]
    channels = gathered.result(TIMEOUT)
    assert list(channels) == [1, 2] and time.monotonic() - began < 4.0, (
        "less than one hello may take"
    )
    Group(channels, "here:1").close()
    for each in followers:
        each.result(TIMEOUT)
    for one in silent:
        let_go(one)


def test_nobody_waits_for_ever() -> None:
    leader, one, _ = ranks(3, wait_s=0.3)
    with pytest.raises(GroupError, match=r"mesh\.coordinator: nobody answers at localhost:"):
        join_group(one, PROFILE)
    one = Rank(one.address, one.port, 3, 1, TIMEOUT)
    follower = joining(one)
    problem = re.escape("of 2 followers have come to localhost:")
    leader = Rank(leader.address, leader.port, 3, 0, 0.7)
    with pytest.raises(GroupError, match=problem):
        gather(leader, PROFILE)
    with pytest.raises(GroupError, match=problem):
        follower.result(TIMEOUT)


def test_a_port_that_is_taken_is_named() -> None:
    leader, _ = ranks(2)
    with (
        socket.create_server((leader.address, leader.port)),
        pytest.raises(
            GroupError, match=f"mesh.coordinator: cannot listen on localhost:{leader.port}"
        ),
    ):
        gather(leader, PROFILE)


def test_nobody_who_does_not_read_the_log_keeps_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, codes, written = threading.Event(), list[int](), list[bool]()
    monkeypatch.setattr(
        process_exit.logging, "shutdown", lambda: written.append(read.wait(TIMEOUT))
    )
    monkeypatch.setattr(process_exit, "_WRITE_S", 0.05)
    monkeypatch.setattr(os, "_exit", codes.append)
    process_exit.end_process(3)
    assert codes == [3] and not written
    read.set()
