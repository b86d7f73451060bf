"""Measurements of an engine or a server: throughput, latency, load."""
