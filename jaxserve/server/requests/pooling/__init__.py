"""Vectors and scores: many prompts in a call, none of which generates text."""
