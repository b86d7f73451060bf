"""A Ray cluster on this machine alone."""
