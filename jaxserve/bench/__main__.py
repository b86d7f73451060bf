"""`python -m jaxserve.bench`; see cli.py."""

import sys

from jaxserve.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
