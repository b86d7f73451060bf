"""`python -m jaxserve.compile_check`; see cli.py."""

from jaxserve.command_line import run
from jaxserve.compile_check.cli import main

if __name__ == "__main__":
    run(main)
