"""`python -m jaxserve`: the command `jaxserve`."""

from jaxserve.cli import entry_point

if __name__ == "__main__":
    entry_point()
