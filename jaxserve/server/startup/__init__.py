"""How a server process starts, and what it says as it does."""
