"""Policies that spend the slack of token deadlines on prompts, and their common parts."""
