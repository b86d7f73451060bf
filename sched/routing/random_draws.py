"""Lots for routers and for simulated losses: the same in Python and in machine code."""

from __future__ import annotations

MODULUS = (1 << 31) - 1


def seeded(seed: int, stream: int) -> int:
    """The state that a stream of draws begins with. seed, stream: at least 0."""
    state = (seed % (MODULUS - 1) + 1) * 48271 % MODULUS
    return drawn((state + 69621 * (stream + 1)) % (MODULUS - 1) + 1)


def drawn(state: int) -> int:
    """The next state, from 1 to MODULUS - 1 and as good as random. Lehmer's generator, with the
    multiplier of Park, Miller and Stockmeyer (CACM 36(7), 1993)."""
    return state * 48271 % MODULUS


def below(state: int, count: int) -> int:
    """A state as a number from 0 to count - 1."""
    return state * count // MODULUS
