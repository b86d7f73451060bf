"""Makes the league of docs/programs.md: policies on closed workloads of programs, simulated."""
