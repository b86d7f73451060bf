"""The best schedule when all requests are known, by search, and bounds on it."""
