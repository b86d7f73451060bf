"""Measurements of kernels and whole models on a device."""
