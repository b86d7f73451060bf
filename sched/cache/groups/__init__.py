"""Groups of layers with block lists of their own, beside the one with all K and V."""
