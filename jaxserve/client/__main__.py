"""`python -m jaxserve.client`; see cli.py."""

from jaxserve.client.cli import main
from jaxserve.command_line import run

if __name__ == "__main__":
    run(main)
