"""Scheduling policies, one file a system; a folder where a system needs several."""
