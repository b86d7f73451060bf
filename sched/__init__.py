"""Scheduling: requests, blocks, plans and policies, and what plans cost; NumPy only."""
