"""Chooses a replica for each request, by snapshots that may be late or lost."""
