"""Makes docs/bros.md: what BROS claims, and what the simulator says."""
