"""InferMax Algorithm 1: the unified scheduler, which most policies configure."""
