"""`python -m jaxserve_lab.experiments.accelgen`; see claims.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.accelgen.claims import AccelGen

main = AccelGen.main

if __name__ == "__main__":
    run(main)
