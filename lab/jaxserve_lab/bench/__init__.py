"""Benches: policies, frontends, kernels, abuse, and how well the simulator predicts."""
