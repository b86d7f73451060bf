"""`python -m jaxserve.experiments.infermax`; see page.py."""

import sys

from jaxserve.experiments.infermax.page import main

if __name__ == "__main__":
    sys.exit(main())
