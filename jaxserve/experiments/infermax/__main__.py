"""`python -m jaxserve.experiments.infermax`; see page.py."""

from jaxserve.command_line import run
from jaxserve.experiments.infermax.page import main

if __name__ == "__main__":
    run(main)
