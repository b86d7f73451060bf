"""InferMax Algorithm 1: the unified scheduler, of which most policies are settings."""
