"""A following host: builds the same executor as the leader, and makes the leader's calls in their
order."""

from __future__ import annotations

import functools
import logging
import signal
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.config import Config
from jaxserve.engine.device.batch_layout import Layout
from jaxserve.engine.device.executor import Executor, Handle, PendingSample
from jaxserve.engine.device.leader_executor import Calls
from jaxserve.engine.device.pooling_step import Wanted
from jaxserve.engine.device.sampling_state import SlotParams
from jaxserve.engine.startup import compilation_cache
from jaxserve.engine.startup.blueprint import Blueprint, build_programs
from jaxserve.engine.startup.choices.device_memory import free_memory
from jaxserve.engine.startup.config_errors import config_errors, first_line
from jaxserve.engine.startup.host_group import BUILD, FACTS, host_profile
from jaxserve.hosts.link import CLOSE, FAILED, Link
from jaxserve.hosts.membership import barrier, join_group
from jaxserve.hosts.messages import Message
from jaxserve.hosts.process_exit import end_process
from jaxserve.hosts.rank import GroupError, Rank
from jaxserve.hosts.runtime import start_jax
from jaxserve.progress import Show

log = logging.getLogger(__name__)

IN_FLIGHT = 2  # steps launched whose results nobody has waited for: as many as the leader has


def follow_leader(config: Config, rank: Rank, on_ready: Callable[[], None]) -> None:
    """Serves with the other hosts until the leader ends. config: as the leader's. on_ready: called
    once this host serves. Raises ConfigError and GroupError. If the leader is lost, the process
    ends with exit code 1."""
    kept = config.engine.compilation_cache_dir
    with config_errors(), compilation_cache.gone_if_refused(kept):
        link, address = join_group(rank, host_profile(config, rank))
        try:
            start_jax(rank, address)
            executor = _build(config, link)
        except Exception as error:
            link.close(Message(FAILED, {"why": first_line(error)}))
            raise
    log.info("host %d of %d follows the leader at %s", rank.index, rank.hosts, rank.coordinator)
    on_ready()
    try:
        replay_calls(link, executor)
    except BaseException as error:
        log.exception("this host ends")
        link.close(Message(FAILED, {"why": first_line(error)}))
        end_process(1)
    executor.close()


def _build(config: Config, link: Link) -> Executor:
    name, free = free_memory()
    facts = {"device": jax.local_devices()[0].device_kind, "memory": [name, free]}
    link.send(Message(FACTS, facts))
    message = link.receive()
    if message.name != BUILD:  # a leader that has closed
        raise GroupError("the leader has ended before it was ready")
    compilation_cache.use(config.engine.compilation_cache_dir)
    blueprint = Blueprint.from_plain(message.fields)
    together = functools.partial(barrier, link)
    programs = build_programs(
        config.model,
        config.mesh.tensor,
        blueprint,
        progress=Show.NOTHING,
        bar=iter,
        barrier=together,
    )
    together()
    link.hurry()
    return programs.executor


def replay_calls(link: Link, executor: Executor) -> None:
    """Makes the leader's calls as they come, until it closes."""
    pending: dict[int, PendingSample] = {}
    launched: deque[Handle] = deque()
    while True:
        message = link.receive()
        if message.name == CLOSE:
            return
        if message.name in (Calls.SUBMIT, Calls.SAMPLE) and len(launched) == IN_FLIGHT:
            launched.popleft().result()  # what went wrong on the device is raised here
        handle = _make(message, executor, pending)
        if handle is not None:
            launched.append(handle)
        link.done()


def _make(message: Message, executor: Executor, pending: dict[int, PendingSample]) -> Handle | None:
    """Makes one call. Returns the step's handle if it samples tokens."""
    fields, arrays = message.fields, message.arrays
    match message.name:
        case Calls.SUBMIT:
            layout, full = Layout(**fields["layout"]), fields["full"]
            return executor.submit(layout, arrays[0], full=full, **_asked(message))
        case Calls.COMPUTE:
            layout = Layout(**fields["layout"])
            step = executor.compute(layout, arrays[0], **_asked(message))
            pending[fields["number"]] = step
        case Calls.SAMPLE:
            return executor.sample(pending.pop(fields["number"]), arrays[0])
        case Calls.ADMIT:
            executor.admit(fields["slot"], SlotParams(arrays[0], *arrays[1:]))
        case Calls.PROJECT_TO_KV:
            executor.project_to_kv(Layout(**fields["layout"]), arrays[0])
        case Calls.COPY_SLOTS:
            executor.copy_slots(arrays[0])
        case Calls.SAVE:
            executor.save(fields["keys"], fields["counts"], arrays[0])
        case Calls.LOAD:
            executor.load(fields["keys"], fields["counts"], arrays[0])
        case Calls.DISCARD:
            executor.discard(fields["keys"])
        case _:
            raise RuntimeError(f"the leader calls {message.name!r}, which is nothing here")
    return None


def _asked(message: Message) -> dict[str, Any]:
    """What a step is asked for beside its tokens."""
    fields, rest = message.fields, message.arrays[1:]
    targets, rest = (rest[0], rest[1:]) if fields["targets"] else (None, rest)
    return {"targets": targets, "wanted": Wanted(*rest) if fields["wanted"] else None}


def leave_signals_to_the_leader() -> None:
    """Ignores the first signal to end, on the main thread of a process of its own. Whoever stops
    all hosts at once also stops the leader, which lets running requests end and then ends this
    host. A second signal ends this host alone."""

    def ignored(number: int, frame: object) -> None:
        log.warning("this host ends when the leader does; a second signal ends it now")
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ignored)
