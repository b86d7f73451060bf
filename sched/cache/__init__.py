"""The accounting of cache blocks and host memory: who holds what, and what moves."""
