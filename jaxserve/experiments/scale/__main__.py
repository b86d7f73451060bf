"""`python -m jaxserve.experiments.scale`; see page.py."""

import sys

from jaxserve.experiments.scale.page import main

if __name__ == "__main__":
    sys.exit(main())
