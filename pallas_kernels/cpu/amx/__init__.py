"""Products on AMX, Intel's matrix units, compiled by numba."""
