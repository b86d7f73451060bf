"""Policies that spend the slack of token deadlines on prompts, and what they share."""
