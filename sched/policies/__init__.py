"""Scheduling policies, one file per system, or a folder if a system needs several."""
