"""Random draws for routers and for simulated losses: the same in Python and in machine code."""

from __future__ import annotations

MODULUS = (1 << 31) - 1


def seeded(seed: int, stream: int) -> int:
    """The initial state of a stream of draws. seed, stream: at least 0."""
    state = (seed % (MODULUS - 1) + 1) * 48271 % MODULUS
    return drawn((state + 69621 * (stream + 1)) % (MODULUS - 1) + 1)


def drawn(state: int) -> int:
    """The next pseudo-random state, from 1 to MODULUS - 1, by Lehmer's generator with the
    multiplier of Park, Miller and Stockmeyer (CACM 36(7), 1993)."""
    return state * 48271 % MODULUS


def below(state: int, count: int) -> int:
    """A state as a number from 0 to count - 1."""
    return state * count // MODULUS
