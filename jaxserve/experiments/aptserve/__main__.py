"""`python -m jaxserve.experiments.aptserve`; see page.py."""

from jaxserve.command_line import run
from jaxserve.experiments.aptserve.page import main

if __name__ == "__main__":
    run(main)
