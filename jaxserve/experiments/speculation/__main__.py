"""`python -m jaxserve.experiments.speculation`; see cli.py."""

from jaxserve.command_line import run
from jaxserve.experiments.speculation.cli import main

if __name__ == "__main__":
    run(main)
