"""What is decided before anything is loaded or compiled, one stage a file."""
