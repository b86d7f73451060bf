"""Policies that schedule programs, as their papers say, one file each."""
