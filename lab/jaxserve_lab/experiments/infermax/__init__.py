"""Makes docs/infermax.md: what InferMax claims, and what the simulator says."""
