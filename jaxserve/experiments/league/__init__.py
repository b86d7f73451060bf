"""The league table: every policy on every workload of the four papers, simulated."""
