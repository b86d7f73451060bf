"""The pages of docs/, the README and the notebooks, held to the code."""
