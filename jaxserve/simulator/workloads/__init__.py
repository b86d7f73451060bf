"""When requests arrive, how long they are, and what they ask for."""
