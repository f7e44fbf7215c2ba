"""Check and time the versions of this layer: `python kernels/adamw/run.py --help`."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # a script's own folder is there: the repo's root should be
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while all else is imported: no traceback
    from kernels.harness import main

    main("adamw")
