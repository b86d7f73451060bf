"""The simulator's command: sweeps over policies, rates and seeds, capacities, tables and traces."""
