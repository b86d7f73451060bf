"""Replicas of the engine behind one door, on Ray Serve."""
