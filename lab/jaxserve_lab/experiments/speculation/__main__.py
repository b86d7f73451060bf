"""`python -m jaxserve_lab.experiments.speculation`; see cli.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.speculation.cli import main

if __name__ == "__main__":
    run(main)
