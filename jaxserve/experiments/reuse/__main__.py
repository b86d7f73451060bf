"""`python -m jaxserve.experiments.reuse`; see cli.py."""

from jaxserve.command_line import run
from jaxserve.experiments.reuse.cli import main

if __name__ == "__main__":
    run(main)
