"""How many files, including connections, the process may have open."""

from __future__ import annotations

import contextlib
import resource

_SHARE = 3 / 8  # of them for connections to one port: HTTP's or gRPC's
_MOST = 4096  # for one port: each may hold a head and pieces of a body and an answer


def raise_limit() -> None:
    """Raises the limit on open files as far as the system allows. Shells and systemd start
    processes with 1,024, for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some report too high a limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_of_a_door() -> int:
    """Most connections to one port, so that files are left for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(1, min(_MOST, int(_SHARE * soft)))
