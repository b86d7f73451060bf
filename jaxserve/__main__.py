"""`python -m jaxserve`: the command `jaxserve`."""

from jaxserve.commands.cli import entry_point

if __name__ == "__main__":
    entry_point()
