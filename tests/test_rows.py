"""Softmax, classifier and column sums: what random inputs at one call do not show."""

import numpy as np
import pytest

import cpu_reference
from kernels.device import to_device, to_host
from kernels.op import OPS, load_all

load_all()


def versions(name):
    ladder = OPS[name].versions.values()
    return pytest.mark.parametrize("version", ladder, ids=[f"{name}-{version.number}" for version in ladder])


@versions("softmax_forward")
@pytest.mark.parametrize("shift", [-1000, 0, 1000])
def test_softmax_does_not_overflow_far_from_zero(version, shift):
    inp = (np.random.default_rng(0).standard_normal((2, 33)) + shift).astype(np.float32)
    truth, out = np.empty((2, 33)), to_device(np.full((2, 33), np.nan, np.float32))
    cpu_reference.softmax_forward(truth, inp.astype(np.float64))
    version(out, to_device(inp))
    assert np.allclose(to_host(out), truth, rtol=2e-5, atol=0)


@versions("fused_classifier")
def test_the_classifier_is_right_for_logits_as_a_trained_model_has_them(version):
    """Far below zero, and one token nearly certain: its loss is small, and its gradient is what is left of p - 1."""
    V, Vp, target = 97, 128, 11
    logits = (np.random.default_rng(0).standard_normal((2, Vp)) * 3 - 100).astype(np.float32)
    logits[0, target] = -80
    targets = np.array([target, 3], np.int32)
    truth, true_losses = logits.astype(np.float64), np.empty(2)
    cpu_reference.fused_classifier(truth, true_losses, 0.5, targets, V)
    out, losses = to_device(logits), to_device(np.full(2, np.nan, np.float32))
    version(out, losses, 0.5, to_device(targets), V)
    assert np.allclose(to_host(losses), true_losses, rtol=1e-5, atol=2e-6)
    assert np.allclose(to_host(out), truth, rtol=1e-4, atol=1e-7)
    assert (to_host(out)[:, V:] == 0).all()


@versions("matmul_backward_bias")
def test_column_sums_are_right_again_the_second_time(version):
    """Counters and partial sums that the first launch has left behind do no harm."""
    dout = np.random.default_rng(0).standard_normal((600, 8)).astype(np.float32)
    dbias, device_dout = to_device(np.zeros(8, np.float32)), to_device(dout)
    for calls in (1, 2, 3):
        version(dbias, device_dout)
        truth = calls * dout.sum(axis=0, dtype=np.float64)
        assert np.linalg.norm(to_host(dbias) - truth) < 1e-5 * np.linalg.norm(truth)
