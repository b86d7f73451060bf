"""The cache of what numba compiles, with checksums."""
