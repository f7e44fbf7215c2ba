"""Arrays of more than 2^31 elements, as the logits of 42 x 1024 tokens are: right to the last row and column."""

import numpy as np
import pytest

import cpu_reference
from kernels.check import relative_error
from kernels.device import ShapeError, cuda, free_scratch, synchronize, to_device, to_host
from kernels.op import load_all

N, OC, V, C = 42_720, 50_304, 50_257, 8  # N * OC is a little more than 2^31
LAST = 40  # rows and columns that are looked at
rng = np.random.default_rng(0)
OPS = load_all()

pytestmark = pytest.mark.gpu


def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def logits():
    if cuda.current_context().get_memory_info().free < 30 << 30:
        pytest.skip("needs 30 GB of GPU memory")
    yield cuda.device_array((N, OC), np.float32)
    free_scratch()


def every_version(name):
    """Each that can run here."""
    return [version for version in OPS[name].versions.values() if not version.why_not()]


def test_products_are_right_to_the_last_row_and_column(logits):
    inp, weight, bias = normal(N, C), normal(OC, C), normal(OC)
    device = [to_device(array) for array in (inp, weight, bias)]
    truth = inp[-LAST:].astype(np.float64) @ weight.T.astype(np.float64) + bias
    for version in every_version("matmul_forward"):
        logits[-LAST:].copy_to_device(np.full((LAST, OC), np.nan, np.float32))
        version(logits, *device)
        synchronize()
        assert relative_error(to_host(logits[-LAST:]), truth) < version.tolerance, f"version {version.number}"

    OPS["matmul_forward"].versions[1](logits, *device[:2], None)  # in fp32: the gradient of the products that follow
    dinp, dweight = (cuda.device_array(array.shape, np.float32) for array in (inp, weight))
    last_rows = inp[-LAST:].astype(np.float64) @ weight.T.astype(np.float64)
    for version in every_version("matmul_backward_input"):
        dinp[-LAST:].copy_to_device(np.full((LAST, C), np.nan, np.float32))
        version(dinp, logits, device[1])
        synchronize()
        assert relative_error(to_host(dinp[-LAST:]), last_rows @ weight) < version.tolerance, f"version {version.number} of dinp"
    last_columns = inp.astype(np.float64) @ weight[-LAST:].T.astype(np.float64)
    for version in every_version("matmul_backward_weight"):
        dweight[-LAST:].copy_to_device(np.full((LAST, C), np.nan, np.float32))
        version(dweight, logits, device[0], 0)
        synchronize()
        error = relative_error(to_host(dweight[-LAST:]), last_columns.T @ inp)
        assert error < version.tolerance, f"version {version.number} of dweight"


def test_the_classifier_is_right_to_the_last_row(logits):
    last, dloss, targets = normal(LAST, OC), 1e-3, rng.integers(0, V, N).astype(np.int32)
    true_losses, gradient = np.empty(LAST), last.astype(np.float64)
    cpu_reference.fused_classifier(gradient, true_losses, dloss, targets[-LAST:], V)
    device_targets, losses = to_device(targets), cuda.device_array(N, np.float32)
    OPS["matmul_forward"].versions[1](logits, to_device(normal(N, C)), to_device(normal(OC, C)), None)  # all other rows
    for version in every_version("fused_classifier"):
        logits[-LAST:].copy_to_device(last)
        try:
            version(logits, losses, dloss, device_targets, V)
        except ShapeError:
            continue
        synchronize()
        assert relative_error(to_host(logits[-LAST:]), gradient) < version.tolerance, f"version {version.number}"
        assert relative_error(to_host(losses[-LAST:]), true_losses) < version.tolerance, f"the losses of version {version.number}"


def test_softmax_is_right_to_the_last_row(logits):
    last, probs = normal(LAST, OC), cuda.device_array((N, OC), np.float32)
    truth = np.empty((LAST, OC))
    cpu_reference.softmax_forward(truth, last.astype(np.float64))
    OPS["matmul_forward"].versions[1](logits, to_device(normal(N, C)), to_device(normal(OC, C)), None)
    logits[-LAST:].copy_to_device(last)
    for version in every_version("softmax_forward"):
        probs[-LAST:].copy_to_device(np.full((LAST, OC), np.nan, np.float32))
        version(probs, logits)
        synchronize()
        assert relative_error(to_host(probs[-LAST:]), truth) < version.tolerance, f"version {version.number}"
