"""What the random inputs of an op's declaration do not ask of its versions: extreme values, values that change between calls."""

import numpy as np
import pytest

import cpu_reference
from kernels.adamw.forward import adamw_inputs, adamw_update
from kernels.check import relative_error
from kernels.device import to_device, to_host
from kernels.encoder.backward import encoder_backward
from kernels.gelu.backward import gelu_backward
from kernels.gelu.forward import gelu_forward


def versions(op):
    return pytest.mark.parametrize("version", op.versions.values(), ids=[f"{op.name}-{n}" for n in op.versions])


def run(version, *arguments, **options) -> list:
    """Calls the version on device copies of the arrays, and returns what is in them afterwards."""
    device = [to_device(a) if isinstance(a, np.ndarray) else a for a in arguments]
    version(*device, **options)
    return [to_host(a) if isinstance(b, np.ndarray) else a for a, b in zip(device, arguments, strict=True)]


x = np.concatenate([np.linspace(-10, 10, 8001), [-1e4, -30, -11, 0, 11, 30, 1e4]]).astype(np.float32)
x64 = x.astype(np.float64)


@versions(gelu_forward)
def test_gelu_is_within_2e_6_of_float64_at_every_input(version):
    truth = np.empty_like(x64)
    cpu_reference.gelu_forward(truth, x64)
    out, _ = run(version, np.full_like(x, np.nan), x)
    assert (np.abs(out - truth) <= 2e-6 * np.maximum(1, np.abs(x))).all()


@versions(gelu_backward)
def test_the_slope_of_gelu_is_within_2e_6_of_float64_at_every_input(version):
    with np.errstate(over="ignore"):  # the reference's exp of a large number
        truth = np.empty_like(x64)
        cpu_reference.gelu_backward(truth, np.clip(x64, -20, 20), np.ones_like(x64))
    dinp, _, _ = run(version, np.full_like(x, np.nan), x, np.ones_like(x))
    assert np.abs(dinp - truth).max() <= 2e-6


def encoder_backward_case(tokens, V, C=8):
    """dwte, dwpe, dout, inp, and what dwte and dwpe must become."""
    rng = np.random.default_rng(5)
    B, T = tokens.shape
    sizes = (V, C), (T + 1, C), (B, T, C)
    arrays = [rng.standard_normal(size, dtype=np.float32) for size in sizes] + [tokens.astype(np.int32)]
    truth = [a.astype(np.float64) for a in arrays[:3]]
    cpu_reference.encoder_backward(*truth, arrays[3])
    return arrays, truth[:2]


def assert_adds_up(version, tokens, V, **options):
    arrays, truth = encoder_backward_case(tokens, V)
    for result, true in zip(run(version, *arrays, **options)[:2], truth, strict=True):
        assert relative_error(result, true) < 1e-6


@pytest.mark.parametrize("number", [5, 7])
@pytest.mark.parametrize("positions", [7, 14, 30])
def test_encoder_backward_adds_up_over_several_sorts(number, positions):
    tokens = np.random.default_rng(0).integers(0, 5, (5, 7))
    assert_adds_up(encoder_backward.versions[number], tokens, 5, positions=positions)


@versions(encoder_backward)
def test_encoder_backward_takes_a_token_that_is_everywhere_and_the_last_of_the_vocabulary(version):
    tokens = np.full((2, 70), 65535)
    tokens[0, ::9] = 255
    tokens[1, ::7] = np.arange(10)
    assert_adds_up(version, tokens, 65536)


@versions(adamw_update)
def test_adamw_reads_step_rate_and_scale_anew_in_every_call(version):
    values = adamw_inputs(np.random.default_rng(0), 301)
    names = list(values)
    device = {name: to_device(a) if isinstance(a, np.ndarray) else a for name, a in values.items()}
    truth = {n: a.astype(np.float64) if getattr(a, "dtype", None) == np.float32 else a for n, a in values.items()}
    for step, rate, scale in ((1, 0.1, 1.0), (2, 0.05, 0.25), (1000, 0.02, 0.0)):
        for name, value in (("step", step), ("learning_rate", rate), ("grad_scale", scale)):
            new = np.array([value], values[name].dtype)
            device[name], truth[name] = to_device(new), new
        version(*[device[name] for name in names])
        cpu_reference.adamw_update(*[truth[name] for name in names])
    for name in ("params", "m", "v"):
        assert relative_error(to_host(device[name]), truth[name]) < 2e-6
