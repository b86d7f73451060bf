"""Speculative decoding: how much each request drafts, and how often drafts are right."""
