"""The same functions in plain XLA, for any device."""
