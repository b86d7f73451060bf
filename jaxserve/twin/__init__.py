"""A twin of somebody's server: what is sent to it and what it answers, as a recording."""
