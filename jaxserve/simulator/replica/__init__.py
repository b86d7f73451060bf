"""Simulated replicas: the engine's loop on a virtual clock, and what comes to it."""
