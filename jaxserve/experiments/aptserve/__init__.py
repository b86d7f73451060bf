"""docs/aptserve.md: Apt-Serve's claims against the simulator and the engine."""
