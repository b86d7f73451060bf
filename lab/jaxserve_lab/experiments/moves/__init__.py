"""Streams that move between two replicas in this process: their pause, part by part."""
