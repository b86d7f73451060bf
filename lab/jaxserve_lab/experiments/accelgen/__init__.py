"""Makes docs/accelgen.md: what AccelGen claims, and what the simulator says."""
