"""Families of models: how each embeds, what a layer does and what comes after the last."""
