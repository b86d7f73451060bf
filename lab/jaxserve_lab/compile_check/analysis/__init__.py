"""Analyses of a compiled program."""
