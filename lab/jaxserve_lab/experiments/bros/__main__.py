"""`python -m jaxserve_lab.experiments.bros`; see page.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.bros.page import main

if __name__ == "__main__":
    run(main)
