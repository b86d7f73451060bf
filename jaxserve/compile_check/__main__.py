"""`python -m jaxserve.compile_check`; see cli.py."""

import sys

from jaxserve.compile_check.cli import main

if __name__ == "__main__":
    sys.exit(main())
