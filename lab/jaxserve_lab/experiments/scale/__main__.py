"""`python -m jaxserve_lab.experiments.scale`; see page.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.scale.page import main

if __name__ == "__main__":
    run(main)
