"""Goodput: who is in time, who is paused, who fills the batch, and who may not be forgotten."""
