"""The process that tries grammars: a child with limits compiles them, and reports what that took.
If a child is killed, another takes over: reading the tokenizer again would take a second.

The library's own limits are not enough: a schema of a hundred characters can keep it busy for ever.
Compiled grammars cannot be moved to another process, so a grammar that passes here is compiled
again there.
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.engine.text.grammar_source import make_matcher, make_tokenizer, one_line
from jaxserve.limited.limits import (
    frame,
    limit_memory,
    limit_time,
    memory_pages,
    read_question,
)
from jaxserve.sched.request import Grammar, GrammarKind, InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

PROBED = 16
"""Masks that are tried after the first one."""
_NOBODY = 77  # exit code of an idle child


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _allocated() -> int:
    """Bytes in use; resident bytes on systems that do not report it."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return memory_pages()[1]
    mallinfo.restype = _MallocInfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def tried(grammar: Grammar, tokenizer: LLTokenizer) -> dict[str, Any]:
    """The cost of a grammar: `bytes` that it keeps when compiled, and `mask_s`, CPU seconds of
    `masks` masks after the first; or its `problem`."""
    before = _allocated()
    try:
        matcher = make_matcher(grammar, tokenizer)
    except InvalidRequest as error:
        return {"problem": error.problem}
    matcher.compute_bitmask()
    if matcher.is_error():
        return {"problem": f"gets too complex: {one_line(matcher.get_error())}"}
    kept = _allocated() - before
    masks, took = _walk(matcher)
    return {"bytes": max(kept, 0), "masks": masks, "mask_s": took}


def _walk(matcher: LLMatcher) -> tuple[int, float]:
    """Number of masks along a text of the grammar, and their CPU seconds."""
    draw, took, masks = random.Random(0), 0.0, 0
    matcher = matcher.deep_copy()
    while masks < PROBED:
        forced = matcher.compute_ff_tokens()
        token = forced[0] if forced else _any_of(matcher.compute_bitmask(), draw)
        if token is None or not matcher.consume_token(token) or matcher.is_stopped():
            break
        begin = time.process_time()
        matcher.compute_bitmask()
        took += time.process_time() - begin
        masks += 1
    return masks, took


def _any_of(mask: bytes, draw: random.Random) -> int | None:
    """A token that the mask allows."""
    for _ in range(64):
        place = draw.randrange(len(mask))
        if mask[place]:
            break
    else:
        place = len(mask) - len(mask.lstrip(b"\0"))
        if place == len(mask):
            return None
    return 8 * place + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def serve_trials(connection: socket.socket) -> None:
    """Answers until the other side closes the connection. The first message has what all questions
    share. `died` is the exit code of a child that gave no answer."""
    shared = read_question(connection)
    tokenizer = make_tokenizer(shared["definition"], shared["vocab_size"], shared["eos_ids"])
    connection.sendall(frame({}))
    del shared["definition"]
    code = 0
    while code != _NOBODY:
        child = os.fork()
        if not child:
            _answer(connection, tokenizer, shared["cpu_s"], shared["memory"])
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, _NOBODY):
            connection.sendall(frame({"died": code}))


def _answer(
    connection: socket.socket, tokenizer: LLTokenizer, cpu_s: float, memory: int
) -> NoReturn:
    """The child: answers until it is killed, or uses too much memory."""
    begin = memory_pages()[0]
    limit_memory(begin + memory)
    while memory_pages()[0] < begin + memory // 4:
        limit_time(cpu_s)
        question = read_question(connection)
        if question is None:
            os._exit(_NOBODY)
        grammar = Grammar(GrammarKind(question["kind"]), question["text"])
        answer = frame(tried(grammar, tokenizer))
        limit_time(0)
        connection.sendall(answer)
    os._exit(0)


if __name__ == "__main__":
    os.nice(5)  # serving has priority
    serve_trials(socket.socket(fileno=0))
