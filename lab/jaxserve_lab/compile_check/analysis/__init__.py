"""What there is to see in a compiled program."""
