"""`python -m jaxserve.experiments.exactness`; see cli.py."""

from jaxserve.command_line import run
from jaxserve.experiments.exactness.cli import main

if __name__ == "__main__":
    run(main)
