"""`python -m jaxserve.experiments.bros`; see page.py."""

from jaxserve.command_line import run
from jaxserve.experiments.bros.page import main

if __name__ == "__main__":
    run(main)
