"""What runs on the device: batches, jitted steps, sampling, moves of cache blocks."""
