"""Servers under abuse and long mixed load."""
