"""What all tests share: where kernels run, and that tests of the GPU are skipped, visibly, where there is none."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: a product takes one, here and in subprocesses
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from kernels.target import TARGET  # before anything imports numba: it says where compiled code is kept

os.environ["LLM_NUMBA_TARGET"] = TARGET  # subprocesses need not look for a GPU again


def pytest_collection_modifyitems(items):
    if TARGET != "gpu":
        skip = pytest.mark.skip(reason="needs a CUDA GPU: run `make test-gpu` where there is one")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
