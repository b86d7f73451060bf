"""Makes docs/scale.md: one stream of requests before many replicas, simulated."""
