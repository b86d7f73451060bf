"""Pictures of runs, schedules and the block pool; matplotlib only."""
