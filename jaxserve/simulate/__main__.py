"""`python -m jaxserve.simulate`; see cli.py."""

from jaxserve.command_line import run
from jaxserve.simulate.cli import main

if __name__ == "__main__":
    run(main)
