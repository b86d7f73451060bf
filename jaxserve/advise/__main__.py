"""`python -m jaxserve.advise`; see cli.py."""

from jaxserve.advise.cli import main
from jaxserve.command_line import run

if __name__ == "__main__":
    run(main)
