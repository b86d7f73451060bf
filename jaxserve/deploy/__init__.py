"""Replicas of the engine behind one address, on Ray Serve."""
