"""Cost models: how long a step takes, and how they are fitted and learned."""
