"""The accounting of cache blocks and host memory: which request holds what, and what moves."""
