"""Answers that may go on at another replica."""
