"""`python -m jaxserve_lab.experiments.infermax`; see page.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.infermax.page import main

if __name__ == "__main__":
    run(main)
