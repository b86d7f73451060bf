"""Recordings of what an engine served, and their replay."""
