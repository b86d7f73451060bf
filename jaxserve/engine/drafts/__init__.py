"""Guesses of the next tokens, made on the host without a model, which a step then checks."""
