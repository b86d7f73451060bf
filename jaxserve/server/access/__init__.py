"""API keys and their limits, and TLS."""
