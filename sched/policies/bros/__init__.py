"""BROS: the urgency of requests, packing of batches, sharing of blocks, best-effort requests."""
