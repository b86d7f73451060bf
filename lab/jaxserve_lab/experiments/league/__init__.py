"""Makes docs/league.md: every policy on every workload of the four papers, simulated."""
