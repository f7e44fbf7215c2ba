"""Where kernels run: on the GPU, in the simulator, or nowhere (they are only compiled).

`LLM_NUMBA_TARGET` chooses: `gpu`, `simulator` or `compile`. Left unset, the GPU where there is one, else the simulator.
This module comes first: it sets numba's cache folder before anything imports numba.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent


def _cache_folder() -> Path:
    """Numba's cache looks at a kernel's own file only. What kernels share, in this folder or in a layer's, is hashed into
    the folder's name, so that an edit of it compiles everything anew; cpu_reference's code too, which lies there as well.
    Folders that nobody has used for a month are removed."""
    shared = hashlib.sha256(version("numba-cuda").encode())
    of_layers = [file for file in HERE.glob("*/*.py") if file.stem not in ("__init__", "forward", "backward", "run")]
    for file in [HERE / "device.py", HERE / "intrinsics.py", HERE / "reduce.py", HERE / "tma.py", *sorted(of_layers)]:
        shared.update(file.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for parent in (Path(home), Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"):  # a container may have no home
        folder = parent / "llm.numba" / shared.hexdigest()[:12]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        for other in folder.parent.iterdir():
            with contextlib.suppress(OSError):  # another process may have removed it
                if time.time() - other.stat().st_mtime > 30 * 24 * 3600:
                    shutil.rmtree(other, ignore_errors=True)
        return folder
    raise SystemExit("error: no folder for compiled kernels can be written: set XDG_CACHE_HOME to one that can")


CACHE_FOLDER = _cache_folder()
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE_FOLDER))
os.environ.setdefault("NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS", "0")  # a small grid is often what a lesson is about


def _choose() -> str:
    asked = os.environ.get("LLM_NUMBA_TARGET", "")
    if asked in ("simulator", "compile"):
        return asked
    if asked not in ("", "gpu"):
        raise SystemExit(f"error: LLM_NUMBA_TARGET={asked}: use gpu, simulator or compile")
    from numba import cuda

    if cuda.is_available():
        return "gpu"
    if asked:
        raise SystemExit("error: LLM_NUMBA_TARGET=gpu: no GPU that CUDA can use was found: leave the variable out")
    return "simulator"


TARGET = _choose()
SIMULATE = TARGET == "simulator"
