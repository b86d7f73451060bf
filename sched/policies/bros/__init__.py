"""BROS: who is how urgent, what a batch holds, whose blocks it takes, what is left for the rest."""
