"""Two replicas on a Ray cluster of this machine: scaled and killed while clients stream."""
