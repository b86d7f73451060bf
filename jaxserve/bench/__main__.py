"""`python -m jaxserve.bench`; see cli.py."""

from jaxserve.bench.cli import main
from jaxserve.command_line import run

if __name__ == "__main__":
    run(main)
