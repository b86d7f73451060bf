"""Goodput: which requests can be in time, which are paused, and which fill the batch."""
