"""`python -m jaxserve.experiments.bros`; see page.py."""

import sys

from jaxserve.experiments.bros.page import main

if __name__ == "__main__":
    sys.exit(main())
