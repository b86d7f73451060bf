"""The state of requests while they are served, one array per property."""
