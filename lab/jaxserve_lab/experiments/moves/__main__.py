"""`python -m jaxserve_lab.experiments.moves`; see cli.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.moves.cli import main

if __name__ == "__main__":
    run(main)
