"""`python -m jaxserve.experiments.aptserve`; see page.py."""

import sys

from jaxserve.experiments.aptserve.page import main

if __name__ == "__main__":
    sys.exit(main())
