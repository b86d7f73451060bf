"""`python -m jaxserve.experiments.accelgen`; see page.py."""

import sys

from jaxserve.experiments.accelgen.page import main

if __name__ == "__main__":
    sys.exit(main())
