"""`python -m jaxserve.experiments.scale`; see page.py."""

from jaxserve.command_line import run
from jaxserve.experiments.scale.page import main

if __name__ == "__main__":
    run(main)
