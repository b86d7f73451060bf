"""Systems to simulate: a model on a device, with its cost model."""
