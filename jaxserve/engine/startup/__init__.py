"""From a configuration to a warm engine."""
