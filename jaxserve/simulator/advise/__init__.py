"""Recommends a policy, by simulating all of them on one's own traffic."""
