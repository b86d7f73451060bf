"""`jaxserve serve` from a clone, without an installed command.

    python serve.py --config=configs/tiny_cpu.py
    python serve.py --model=/path/to/checkpoint --config.scheduler.max_rows=16
    python serve.py --help

Presets are in configs/.
"""

import gc
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ^C ends it at once while it imports
    gc.disable()  # until it serves: a seventh of a start would be spent looking for garbage

    from jaxserve.command_line import run
    from jaxserve.commands.serve import main

    run(lambda: main(sys.argv[1:], "serve.py"))
