"""How many files, connections among them, the process may have open."""

from __future__ import annotations

import contextlib
import resource

_SHARE = 3 / 8  # of them, for the connections of one door: HTTP's or gRPC's
_MOST = 4096  # of one door: each may keep a head, a piece of a body and one of an answer


def raise_limit() -> None:
    """As far as the system lets it: shells and systemd start processes with 1,024, for the sake of
    those that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some have another limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_of_a_door() -> int:
    """At most, so that there are files left for all else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, int(_SHARE * soft)))
