"""`python -m jaxserve.client`; see cli.py."""

import sys

from jaxserve.client.cli import main

if __name__ == "__main__":
    sys.exit(main())
