"""Several hosts that serve one model: who they are, and what they tell each other."""
