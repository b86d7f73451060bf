"""Which replica gets a request, from snapshots of the replicas that are late or lost."""
