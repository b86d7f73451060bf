"""Presets: each file has a `get_config()`."""
