"""docs/infermax.md: InferMax's claims against the simulator."""
