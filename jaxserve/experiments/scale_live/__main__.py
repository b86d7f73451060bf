"""`python -m jaxserve.experiments.scale_live`; see live.py."""

import sys

from jaxserve.experiments.scale_live.live import main

if __name__ == "__main__":
    sys.exit(main())
