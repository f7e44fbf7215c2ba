"""What all tests share: where kernels run, who compiles them where nothing runs, and that tests of the GPU are skipped,
visibly, where there is none."""

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: a product takes one, here and in subprocesses
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from kernels.target import TARGET  # before anything imports numba: it says where compiled code is kept

os.environ["LLM_NUMBA_TARGET"] = TARGET  # subprocesses need not look for a GPU again

gc.set_threshold(100_000, 20, 100)  # compilers and the simulator make objects by the million, few of them in cycles


def pytest_collection_modifyitems(config, items):
    """What compiles goes first: so one worker does it all, whose process knows the device functions by then. And where there
    is no GPU each test of it is skipped once, not for every version and shape."""
    items.sort(key=lambda item: "compiler" not in item.fixturenames)
    if TARGET == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: run `make test-gpu` where there is one")
    kept, again, seen = [], [], set()
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
            (again if item.function in seen else kept).append(item)
            seen.add(item.function)
        else:
            kept.append(item)
    config.hook.pytest_deselected(items=again)
    items[:] = kept


@pytest.fixture(scope="session")
def compiler():
    """A process whose target is `compile`, as a process has one target: `compiler.submit(function, ...).result()`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=check_target) as pool:
        os.environ["LLM_NUMBA_TARGET"] = "compile"
        try:
            pool.submit(os.getpid).result()  # the process starts here, with this environment
        finally:
            os.environ["LLM_NUMBA_TARGET"] = TARGET
        yield pool
        pool.submit(os._exit, 0)  # to take leave of all that it compiled would take it seconds


def check_target():
    assert TARGET == "compile"
