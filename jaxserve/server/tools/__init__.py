"""Calls of tools in a model's text: formats by name, parsers, grammars."""
