"""`python -m jaxserve_lab.experiments.exactness`; see cli.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.exactness.cli import main

if __name__ == "__main__":
    run(main)
