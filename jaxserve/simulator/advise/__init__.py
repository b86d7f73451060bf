"""Which policy to serve with: all of them simulated on one's own traffic."""
