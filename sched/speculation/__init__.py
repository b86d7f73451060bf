"""Speculative decoding: who drafts how much, and how often drafts are right."""
