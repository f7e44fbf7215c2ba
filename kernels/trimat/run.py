"""Check and time the versions of this layer: `python kernels/trimat/run.py --help`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # a script's own folder is there: the repo's root should be
    from kernels.harness import main

    main("trimat")
