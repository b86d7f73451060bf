"""Vectors and scores: prompts that nothing is generated for, many of them in a call."""
