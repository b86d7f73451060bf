"""`python -m jaxserve_lab.experiments.bros`; see claims.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.bros.claims import Bros

main = Bros.main

if __name__ == "__main__":
    run(main)
