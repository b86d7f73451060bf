"""Serving on a virtual clock: systems, replicas, the scheduler's counted state, results."""
