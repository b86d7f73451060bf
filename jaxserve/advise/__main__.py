"""`python -m jaxserve.advise`; see cli.py."""

import sys

from jaxserve.advise.cli import main

if __name__ == "__main__":
    sys.exit(main())
