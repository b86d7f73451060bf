"""The engine of the pages on papers: tables of claims, and the runs that they are held against."""
