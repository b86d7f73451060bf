"""Processes with limits, for what others have written and may never end."""
