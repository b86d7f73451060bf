"""Which policy to serve with."""
