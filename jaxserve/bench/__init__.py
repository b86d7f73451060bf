"""Measurements: throughput, latency, load, kernels, and how well the simulator predicts."""
