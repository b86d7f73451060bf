"""Programs: the calls of one agent run, what is known and learned of them, and how each ends."""
