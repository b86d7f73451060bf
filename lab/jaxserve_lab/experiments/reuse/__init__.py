"""Makes the measured part of docs/reuse.md: what prefix caching finds, keeps and saves."""
