"""AccelGen: how large a batch may be, who is how urgent, who of the others fills it."""
