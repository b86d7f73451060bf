"""`python -m jaxserve_lab.experiments.aptserve`; see claims.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.aptserve.claims import AptServe

main = AptServe.main

if __name__ == "__main__":
    run(main)
