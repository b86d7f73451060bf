"""Presets: one `get_config()` a file."""
