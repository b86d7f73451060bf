"""How a server process starts, and its messages at start."""
