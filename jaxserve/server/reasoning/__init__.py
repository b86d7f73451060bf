"""Thoughts in a model's text: formats by name, parsers, and what a whole message is made of."""
