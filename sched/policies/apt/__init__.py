"""Apt-Serve: values, the greedy over both kinds of cache, starts, and running requests."""
