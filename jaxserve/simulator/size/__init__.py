"""Says how many replicas a rate and its targets need."""
