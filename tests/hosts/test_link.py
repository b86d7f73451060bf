"""What a host hears of another one, and when it takes it for lost."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest

from jaxserve.hosts.channel import Channel
from jaxserve.hosts.link import CLOSE, FAILED, Link
from jaxserve.hosts.messages import Message

from .peers import SOON, TIMEOUT, Losses, channels, links, sockets


def test_messages_come_in_order_both_ways() -> None:
    leader, follower, here, there = links()
    big = np.arange(1 << 18, dtype=np.int32)  # more than a socket holds
    for number in range(20):
        leader.send(Message("call", {"number": number}, (big[: number * 4096],)))
        follower.send(Message("answer", {"number": number}))
    for number in range(20):
        message = follower.receive(TIMEOUT)
        assert message.fields == {"number": number}
        np.testing.assert_array_equal(message.arrays[0], big[: number * 4096])
        assert leader.receive(TIMEOUT).fields == {"number": number}
    leader.close(Message(CLOSE))
    assert follower.receive(TIMEOUT).name == CLOSE
    assert not here.any and not there.any


def test_one_that_says_that_it_has_failed_is_lost() -> None:
    leader, follower, here, _ = links()
    follower.close(Message(FAILED, {"why": "no such checkpoint"}))
    assert here.wait() == "the follower: no such checkpoint"
    leader.send(Message("call"))  # to nobody, and nothing is raised
    assert not here.any


def test_one_whose_process_has_ended_is_lost_at_once() -> None:
    ends, here = channels(), Losses()
    link = Link(ends[0], "the follower", here, patience_s=TIMEOUT)
    link.start()
    ends[1].close()
    assert here.wait() == "the follower is gone"


def test_one_that_is_silent_is_lost() -> None:
    ends, here = channels(), Losses()
    link = Link(ends[0], "the follower", here, patience_s=SOON)
    link.start()
    while link._now < 2 * SOON:  # it may take long to start
        assert not here.any
        link._over.wait(0.01)
    link.hurry()
    assert here.wait() == f"the follower has said nothing for {SOON:g} s"


def test_one_that_says_what_it_should_not_is_lost() -> None:
    beats = [Message("beat", {"done": done}) for done in ("much", None, math.inf)]
    for wrong in (Message("beat"), *beats, Message(FAILED)):
        ends, here = channels(), Losses()
        Link(ends[0], "the follower", here, patience_s=TIMEOUT).start()
        ends[1].send(wrong)
        assert here.wait().startswith("the follower sent an invalid message")


def test_one_that_beats_but_does_not_get_on_is_lost() -> None:
    leader, follower, here, _ = links(SOON)
    leader.send(Message("call"))
    leader.mark()
    follower.receive(TIMEOUT)
    assert here.wait() == f"the follower is {SOON:g} s behind"


def test_one_that_gets_on_is_not() -> None:
    """Beats go on meanwhile, for longer than a silent one would have."""
    leader, follower, here, there = links(2 * SOON)
    for _ in range(3):
        leader.send(Message("call"))
        leader.mark()
        follower.receive(TIMEOUT)
        follower.done()
    while min(leader._now, follower._now) < 3 * SOON and not (here.any or there.any):
        follower._over.wait(0.01)
    assert not here.any and not there.any


def test_a_message_that_nobody_takes_is_a_loss() -> None:
    """The other side is stopped: it reads nothing, and what is sent fills its buffers."""
    one, other = sockets()
    here = Losses()
    link = Link(Channel(one, SOON), "the follower", here, patience_s=TIMEOUT)
    for _ in range(64):
        link.send(Message("call", {}, (np.zeros(1 << 18, np.int32),)))
    assert here.wait() == "the follower is gone"
    other.close()


def test_a_message_that_comes_in_drips_is_not_waited_for() -> None:
    """It has its time as a whole, and not each part of it."""
    one, other = sockets()
    given_up = threading.Event()

    def drip() -> None:
        one.sendall((1 << 20).to_bytes(4, "big"))
        for _ in range(1000):
            one.sendall(b" ")
            if given_up.wait(0.01):
                return
        one.close()

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        Channel(other, TIMEOUT).receive(0.1)
    given_up.set()
    thread.join(TIMEOUT)
    other.close()


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02no"])
def test_what_is_no_message_ends_the_link(sent: bytes) -> None:
    one, other = sockets()
    here = Losses()
    Link(Channel(one, TIMEOUT), "the follower", here, patience_s=TIMEOUT).start()
    other.sendall(sent)
    assert here.wait().startswith("the follower ")
    other.close()
