"""Service-level objectives: targets, verdicts, predicted waits, admission, metrics."""
