"""Simulated replicas: the engine's loop on a virtual clock, and its arrivals."""
