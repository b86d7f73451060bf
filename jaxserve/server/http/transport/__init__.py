"""The HTTP server: connections, bytes, limits on both."""
