"""Check and time the versions of this layer: `python kernels/trimat/run.py --help`."""

from kernels.harness import main

if __name__ == "__main__":
    main("trimat")
