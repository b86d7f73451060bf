"""Formats of calls of tools, one file each."""
