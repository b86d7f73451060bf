"""Policies of the unified scheduler's family simulated in machine code, by numba."""
