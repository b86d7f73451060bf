"""`python -m jaxserve_lab.experiments.scale_live`; see live.py."""

from jaxserve.command_line import run
from jaxserve_lab.experiments.scale_live.live import main

if __name__ == "__main__":
    run(main)
