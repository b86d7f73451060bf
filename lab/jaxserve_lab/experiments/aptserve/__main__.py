"""`python -m jaxserve_lab.experiments.aptserve`; see page.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.aptserve.page import main

if __name__ == "__main__":
    run(main)
