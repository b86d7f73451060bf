"""`python -m jaxserve.simulate`; see cli.py."""

import sys

from jaxserve.simulate.cli import main

if __name__ == "__main__":
    sys.exit(main())
