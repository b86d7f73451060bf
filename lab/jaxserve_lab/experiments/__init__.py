"""Experiments whose results are pages in docs/, each made by one command."""
