"""Workloads: arrivals, lengths and SLOs of requests."""
