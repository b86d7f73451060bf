"""From requests to tokens: batches, jitted steps, sampling, the loop, detokenising."""
