"""`python -m jaxserve_lab.experiments.infermax`; see claims.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.infermax.claims import InferMax

main = InferMax.main

if __name__ == "__main__":
    run(main)
