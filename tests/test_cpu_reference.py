"""cpu_reference against formulas of numpy in float64 that are written another way, and against finite differences.

Every output that is overwritten starts as NaN, and every one that is added to starts as noise.
"""

import math

import numba
import numpy as np
import pytest

import cpu_reference as ref

# float32 within 1e-5 of the truth in norm; float64 as the truth itself, but for its last digits
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-12}
# (B, T, C, NH): one number; one channel a head; one row of three; more queries than attention takes at a time
SHAPES = [(1, 1, 1, 1), (1, 5, 3, 3), (3, 1, 3, 1), (2, 150, 24, 3)]
ROWS = [(1, 1), (1, 3), (7, 1), (300, 131)]  # (N, C)

each_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_rows = pytest.mark.parametrize("rows", ROWS, ids=str)


class Noise:
    """Random arrays of one dtype, and their float64 copies of the same values for the truth."""

    def __init__(self, dtype, seed=1):
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def __call__(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def nan(self, *shape):
        return np.full(shape, np.nan, self.dtype)

    def tokens(self, V, *shape):
        return self.rng.integers(0, V, shape).astype(np.int32)


def f64(*arrays):
    copies = [array.astype(np.float64) for array in arrays]
    return copies if len(copies) > 1 else copies[0]


def relative_error(actual, truth):
    """The norm of the difference over the norm of the truth."""
    size = np.linalg.norm(truth)
    return np.linalg.norm(f64(actual) - truth) / (size if size else 1)


def assert_agrees(actual, truth):
    assert actual.shape == np.shape(truth)
    error = relative_error(actual, truth)
    assert error <= TOLERANCE[actual.dtype.type], f"relative error {error:.2e}"


def finite_difference(loss, x, h=1e-6):
    """The gradient of loss(), a float that depends on the float64 array x, by central differences."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + h
        above = loss()
        x[i] = kept - h
        gradient[i] = (above - loss()) / (2 * h)
        x[i] = kept
    return gradient


def assert_is_gradient(gradient, loss, x):
    """gradient is that of loss() by x: equal to finite differences in all the digits these have."""
    np.testing.assert_allclose(gradient, finite_difference(loss, x), rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------------------------------
# formulas


def onehot(tokens, V):
    return np.eye(V)[tokens]


def layernorm_truth(x, weight, bias):
    centered = x - x.mean(1, keepdims=True)
    rstd = (np.einsum("nc,nc->n", centered, centered) / x.shape[1] + 1e-5) ** -0.5
    return np.einsum("nc,n,c->nc", centered, rstd, weight) + bias, x.mean(1), rstd


def layernorm_gradient_truth(dout, x, weight):
    """dinp through the Jacobian (identity - 1/C - norm norm^T / C) * rstd of each row; dweight; dbias."""
    N, C = x.shape
    norm, _, rstd = layernorm_truth(x, np.ones(C), np.zeros(C))
    jacobian = (np.eye(C) - 1 / C - np.einsum("ni,nj->nij", norm, norm) / C) * rstd[:, None, None]
    return np.einsum("nij,nj->ni", jacobian, dout * weight), np.einsum("nc,nc->c", dout, norm), dout.sum(0)


def gelu_truth(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope_truth(x):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x / np.cosh(u) ** 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def softmax_truth(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def causal(scores):
    T = scores.shape[-1]
    return np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)


def split(qkv, NH):
    """q, k, v (B,NH,T,hs)."""
    B, T, C3 = qkv.shape
    return [part.reshape(B, T, NH, C3 // 3 // NH).transpose(0, 2, 1, 3) for part in np.split(qkv, 3, axis=2)]


def join(heads):
    B, NH, T, hs = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(B, T, NH * hs)


def attention_truth(qkv, NH):
    """out (B,T,C), lse (B,NH,T), att (B,NH,T,T)."""
    q, k, v = split(qkv, NH)
    scores = causal(np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[3]))
    att = softmax_truth(scores)
    return join(np.einsum("bhij,bhjd->bhid", att, v)), np.log(np.exp(scores).sum(3)), att


def attention_gradient_truth(dout, qkv, NH):
    q, k, v = split(qkv, NH)
    do = dout.reshape(dout.shape[0], dout.shape[1], NH, -1).transpose(0, 2, 1, 3)
    att = attention_truth(qkv, NH)[2]
    datt = np.einsum("bhid,bhjd->bhij", do, v)
    dscores = att * (datt - np.einsum("bhij,bhij->bhi", att, datt)[..., None]) / math.sqrt(q.shape[3])
    dq = np.einsum("bhij,bhjd->bhid", dscores, k)
    dk = np.einsum("bhij,bhid->bhjd", dscores, q)
    dv = np.einsum("bhij,bhid->bhjd", att, do)
    return np.concatenate([join(dq), join(dk), join(dv)], axis=2)


# ---------------------------------------------------------------------------------------------------------------------
# exp, in which float32 has a series of its own


def test_exp_of_float32_is_right_to_its_last_digits_over_the_range():
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    assert np.max(np.abs(exp_of(x) / np.exp(f64(x)) - 1)) < 1.5e-7


def test_exp_lets_nan_through_and_is_nothing_and_huge_at_the_infinities():
    nan, nothing, huge, one = exp_of(np.array([np.nan, -np.inf, np.inf, 0], np.float32))
    assert np.isnan(nan) and 0 <= nothing < 1e-37 and huge > 1e38 and one == 1


@numba.njit
def exp_of(x):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = ref.exp(x[i])
    return out


# ---------------------------------------------------------------------------------------------------------------------
# encoder


@each_dtype
@each_shape
def test_encoder_forward(shape, dtype):
    B, T, C, _ = shape
    noise = Noise(dtype)
    inp, wte, wpe, out = noise.tokens(6, B, T), noise(6, C), noise(T + 2, C), noise.nan(B, T, C)
    ref.encoder_forward(out, inp, wte, wpe)
    assert_agrees(out, onehot(inp, 6) @ f64(wte) + f64(wpe)[:T])


@each_dtype
@each_shape
def test_encoder_backward_adds_up_the_gradients_of_a_repeated_token(shape, dtype):
    B, T, C, _ = shape
    noise = Noise(dtype)
    inp, dout, dwte, dwpe = noise.tokens(3, B, T), noise(B, T, C), noise(5, C), noise(T + 2, C)
    dwte_truth = f64(dwte) + np.einsum("btv,btc->vc", onehot(inp, 5), f64(dout))
    dwpe_truth = f64(dwpe) + np.pad(f64(dout).sum(0), ((0, 2), (0, 0)))
    ref.encoder_backward(dwte, dwpe, dout, inp)
    assert_agrees(dwte, dwte_truth)
    assert_agrees(dwpe, dwpe_truth)


def test_encoder_backward_is_the_gradient():
    noise = Noise(np.float64)
    inp, wte, wpe, dout, out = noise.tokens(3, 2, 4), noise(3, 5), noise(6, 5), noise(2, 4, 5), noise.nan(2, 4, 5)

    def loss():
        ref.encoder_forward(out, inp, wte, wpe)
        return np.vdot(out, dout)

    dwte, dwpe = np.zeros_like(wte), np.zeros_like(wpe)
    ref.encoder_backward(dwte, dwpe, dout, inp)
    assert_is_gradient(dwte, loss, wte)
    assert_is_gradient(dwpe, loss, wpe)


# ---------------------------------------------------------------------------------------------------------------------
# layernorm and residual


@each_dtype
@each_rows
def test_layernorm_forward(rows, dtype):
    N, C = rows
    noise = Noise(dtype)
    inp, weight, bias = noise(N, C) + dtype(3), noise(C), noise(C)
    out, mean, rstd = noise.nan(N, C), noise.nan(N), noise.nan(N)
    ref.layernorm_forward(out, mean, rstd, inp, weight, bias)
    for actual, truth in zip((out, mean, rstd), layernorm_truth(*f64(inp, weight, bias)), strict=True):
        assert_agrees(actual, truth)


@each_dtype
@each_rows
def test_layernorm_backward_adds(rows, dtype):
    N, C = rows
    noise = Noise(dtype)
    dout, inp, weight = noise(N, C), noise(N, C), noise(C)
    mean, rstd = (x.astype(dtype) for x in layernorm_truth(f64(inp), np.ones(C), np.zeros(C))[1:])
    gradients = noise(N, C), noise(C), noise(C)
    truths = [f64(x) + dx for x, dx in zip(gradients, layernorm_gradient_truth(*f64(dout, inp, weight)), strict=True)]
    ref.layernorm_backward(*gradients, dout, inp, weight, mean, rstd)
    for gradient, truth in zip(gradients, truths, strict=True):
        assert_agrees(gradient, truth)


def test_layernorm_backward_is_the_gradient():
    noise = Noise(np.float64)
    inp, weight, bias, dout = noise(4, 7), noise(7), noise(7), noise(4, 7)
    out, mean, rstd = noise.nan(4, 7), noise.nan(4), noise.nan(4)

    def loss():
        ref.layernorm_forward(out, mean, rstd, inp, weight, bias)
        return np.vdot(out, dout)

    loss()
    dinp, dweight, dbias = np.zeros_like(inp), np.zeros_like(weight), np.zeros_like(bias)
    ref.layernorm_backward(dinp, dweight, dbias, dout, inp, weight, mean, rstd)
    assert_is_gradient(dinp, loss, inp)
    assert_is_gradient(dweight, loss, weight)
    assert_is_gradient(dbias, loss, bias)


@each_dtype
@pytest.mark.parametrize("size", [1, 3, 5000])
def test_residual_forward(size, dtype):
    noise = Noise(dtype)
    inp1, inp2, out = noise(size), noise(size), noise.nan(size)
    ref.residual_forward(out, inp1, inp2)
    assert_agrees(out, f64(inp1) + f64(inp2))


@each_dtype
@each_rows
def test_fused_residual_forward(rows, dtype):
    N, C = rows
    noise = Noise(dtype)
    inp1, inp2, weight, bias = noise(N, C), noise(N, C), noise(C), noise(C)
    residual, out, mean, rstd = noise.nan(N, C), noise.nan(N, C), noise.nan(N), noise.nan(N)
    ref.fused_residual_forward(residual, out, mean, rstd, inp1, inp2, weight, bias)
    assert_agrees(residual, f64(inp1) + f64(inp2))
    for actual, truth in zip((out, mean, rstd), layernorm_truth(*f64(residual, weight, bias)), strict=True):
        assert_agrees(actual, truth)


@each_dtype
@each_rows
def test_fused_residual_backward_adds_and_takes_the_bias_gradient_of_the_finished_sum(rows, dtype):
    N, C = rows
    noise = Noise(dtype)
    dout, residual, weight = noise(N, C), noise(N, C), noise(C)
    mean, rstd = (x.astype(dtype) for x in layernorm_truth(f64(residual), np.ones(C), np.zeros(C))[1:])
    gradients = noise(N, C), noise(C), noise(C)
    truths = [
        f64(x) + dx for x, dx in zip(gradients, layernorm_gradient_truth(*f64(dout, residual, weight)), strict=True)
    ]
    dprojb = noise(C)
    dprojb_truth = f64(dprojb) + truths[0].sum(0)
    dresidual, dweight, dbias = gradients
    ref.fused_residual_backward(dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd)
    for gradient, truth in zip(gradients, truths, strict=True):
        assert_agrees(gradient, truth)
    assert_agrees(dprojb, dprojb_truth)


def test_fused_residual_backward_is_the_gradient():
    """Of a projection's input inp2 = x + projb, through the layernorm and through the residual stream itself."""
    noise = Noise(np.float64)
    inp1, x, projb, weight, bias = noise(3, 5), noise(3, 5), noise(5), noise(5), noise(5)
    dout, dstream = noise(3, 5), noise(3, 5)
    residual, out, mean, rstd = noise.nan(3, 5), noise.nan(3, 5), noise.nan(3), noise.nan(3)

    def loss():
        ref.fused_residual_forward(residual, out, mean, rstd, inp1, x + projb, weight, bias)
        return np.vdot(out, dout) + np.vdot(residual, dstream)

    loss()
    dresidual, dweight, dbias, dprojb = dstream.copy(), np.zeros(5), np.zeros(5), np.zeros(5)
    ref.fused_residual_backward(dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd)
    for gradient, of in ((dresidual, inp1), (dresidual, x), (dprojb, projb), (dweight, weight), (dbias, bias)):
        assert_is_gradient(gradient, loss, of)


# ---------------------------------------------------------------------------------------------------------------------
# gelu


@each_dtype
@pytest.mark.parametrize("size", [1, 3, 5000])
def test_gelu(size, dtype):
    noise = Noise(dtype)
    inp, dout, out, dinp = 3 * noise(size), noise(size), noise.nan(size), noise.nan(size)
    ref.gelu_forward(out, inp)
    ref.gelu_backward(dinp, inp, dout)
    assert_agrees(out, gelu_truth(f64(inp)))
    assert_agrees(dinp, gelu_slope_truth(f64(inp)) * f64(dout))


@each_dtype
def test_gelu_is_finite_far_out(dtype):
    inp = np.array([-1e4, -30, -6, 0, 6, 30, 1e4], dtype)
    out, dinp = np.full(7, np.nan, dtype), np.full(7, np.nan, dtype)
    ref.gelu_forward(out, inp)
    ref.gelu_backward(dinp, inp, np.ones(7, dtype))
    np.testing.assert_allclose(out, [0, 0, 0, 0, 6, 30, 1e4], atol=1e-8)
    np.testing.assert_allclose(dinp, [0, 0, 0, 0.5, 1, 1, 1], atol=1e-6)


def test_gelu_backward_is_the_gradient():
    noise = Noise(np.float64)
    inp, dout, out, dinp = 2 * noise(50), noise(50), noise.nan(50), noise.nan(50)

    def loss():
        ref.gelu_forward(out, inp)
        return np.vdot(out, dout)

    ref.gelu_backward(dinp, inp, dout)
    assert_is_gradient(dinp, loss, inp)


# ---------------------------------------------------------------------------------------------------------------------
# matmul, through BLAS and in loops

PRODUCTS = [(1, 1, 1), (1, 3, 5), (7, 1, 3), (5, 129, 70), (3, 4, 2100)]  # (N, C, OC)
each_product = pytest.mark.parametrize("product", PRODUCTS, ids=str)


@each_dtype
@each_product
@pytest.mark.parametrize("forward", [ref.matmul_forward, ref.matmul_forward_loops])
def test_matmul_forward(forward, product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    inp, weight, bias, out = noise(N, C), noise(OC, C), noise(OC), noise.nan(N, OC)
    forward(out, inp, weight, bias)
    assert_agrees(out, np.einsum("nc,oc->no", *f64(inp, weight)) + f64(bias))


@each_dtype
@each_product
def test_matmul_forward_without_a_bias(product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    inp, weight, out = noise(N, C), noise(OC, C), noise.nan(N, OC)
    ref.matmul_forward(out, inp, weight, None)
    assert_agrees(out, np.einsum("nc,oc->no", *f64(inp, weight)))


@each_dtype
@each_product
@pytest.mark.parametrize("backward_input", [ref.matmul_backward_input, ref.matmul_backward_input_loops])
def test_matmul_backward_input(backward_input, product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    dout, weight, dinp = noise(N, OC), noise(OC, C), noise.nan(N, C)
    backward_input(dinp, dout, weight)
    assert_agrees(dinp, np.einsum("no,oc->nc", *f64(dout, weight)))


@each_dtype
@each_product
@pytest.mark.parametrize("backward_weight", [ref.matmul_backward_weight, ref.matmul_backward_weight_loops])
def test_matmul_backward_weight_overwrites_or_adds(backward_weight, product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    dout, inp, overwritten, added = noise(N, OC), noise(N, C), noise.nan(OC, C), noise(OC, C)
    truth = np.einsum("no,nc->oc", *f64(dout, inp))
    added_truth = f64(added) + truth
    backward_weight(overwritten, dout, inp, False)
    backward_weight(added, dout, inp, True)
    assert_agrees(overwritten, truth)
    assert_agrees(added, added_truth)


@each_dtype
@each_product
def test_matmul_backward_bias_adds(product, dtype):
    N, _, OC = product
    noise = Noise(dtype)
    dout, dbias = noise(N, OC), noise(OC)
    truth = f64(dbias) + np.einsum("no->o", f64(dout))
    ref.matmul_backward_bias(dbias, dout)
    assert_agrees(dbias, truth)


@each_dtype
@each_product
def test_matmul_with_gelu_or_residual(product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    inp, weight, bias, residual = noise(N, C), noise(OC, C), noise(OC), noise(N, OC)
    pre_truth = np.einsum("nc,oc->no", *f64(inp, weight)) + f64(bias)
    out, pre, summed = noise.nan(N, OC), noise.nan(N, OC), noise.nan(N, OC)
    ref.matmul_gelu_forward(out, pre, inp, weight, bias)
    ref.matmul_residual_forward(summed, inp, weight, bias, residual)
    assert_agrees(pre, pre_truth)
    assert_agrees(out, gelu_truth(pre_truth))
    assert_agrees(summed, f64(residual) + pre_truth)


@each_dtype
@each_product
def test_matmul_gelu_backward_input(product, dtype):
    N, C, OC = product
    noise = Noise(dtype)
    dout, weight, pre, dinp = noise(N, OC), noise(OC, C), noise(N, C), noise.nan(N, C)
    ref.matmul_gelu_backward_input(dinp, dout, weight, pre)
    assert_agrees(dinp, np.einsum("no,oc->nc", *f64(dout, weight)) * gelu_slope_truth(f64(pre)))


def test_matmul_backward_is_the_gradient():
    """Of gelu and two matmuls, as in the model's MLP: by each weight, each bias and the input."""
    noise = Noise(np.float64)
    inp, weight1, bias1, weight2, bias2 = noise(4, 3), noise(6, 3), noise(6), noise(3, 6), noise(3)
    dout, pre, act, out = noise(4, 3), noise.nan(4, 6), noise.nan(4, 6), noise.nan(4, 3)

    def loss():
        ref.matmul_gelu_forward(act, pre, inp, weight1, bias1)
        ref.matmul_residual_forward(out, act, weight2, bias2, inp)
        return np.vdot(out, dout)

    loss()
    dweight1, dbias1, dweight2, dbias2 = noise.nan(6, 3), np.zeros(6), noise.nan(3, 6), np.zeros(3)
    dpre, dinp = noise.nan(4, 6), noise.nan(4, 3)
    ref.matmul_backward_weight(dweight2, dout, act, False)
    ref.matmul_backward_bias(dbias2, dout)
    ref.matmul_gelu_backward_input(dpre, dout, weight2, pre)
    ref.matmul_backward_weight(dweight1, dpre, inp, False)
    ref.matmul_backward_bias(dbias1, dpre)
    ref.matmul_backward_input(dinp, dpre, weight1)
    for gradient, of in ((dweight1, weight1), (dbias1, bias1), (dweight2, weight2), (dbias2, bias2)):
        assert_is_gradient(gradient, loss, of)
    assert_is_gradient(dinp + dout, loss, inp)  # inp is the residual too


# ---------------------------------------------------------------------------------------------------------------------
# attention


@each_dtype
@each_shape
def test_attention_forward(shape, dtype):
    B, T, C, NH = shape
    noise = Noise(dtype)
    qkv, out, lse = noise(B, T, 3 * C), noise.nan(B, T, C), noise.nan(B, NH, T)
    ref.attention_forward(out, lse, qkv, NH)
    out_truth, lse_truth, _ = attention_truth(f64(qkv), NH)
    assert_agrees(out, out_truth)
    assert_agrees(lse, lse_truth)


@each_dtype
@each_shape
def test_attention_backward(shape, dtype):
    B, T, C, NH = shape
    noise = Noise(dtype)
    qkv, dout, dqkv = noise(B, T, 3 * C), noise(B, T, C), noise.nan(B, T, 3 * C)
    out, lse, _ = (x.astype(dtype) for x in attention_truth(f64(qkv), NH))
    ref.attention_backward(dqkv, dout, qkv, out, lse, NH)
    if T == 1:  # one key has all the probability: the truth for q and k is zero, which no relative error can measure
        assert np.max(np.abs(dqkv[..., : 2 * C])) <= 10 * np.finfo(dtype).eps * np.max(np.abs(dout)) * C
    assert_agrees(dqkv, attention_gradient_truth(*f64(dout, qkv), NH))


def test_attention_backward_is_the_gradient():
    noise = Noise(np.float64)
    B, T, C, NH = 1, 70, 4, 2  # T over a band of queries
    qkv, dout, out, lse = noise(B, T, 3 * C), noise(B, T, C), noise.nan(B, T, C), noise.nan(B, NH, T)

    def loss():
        ref.attention_forward(out, lse, qkv, NH)
        return np.vdot(out, dout)

    loss()
    dqkv = np.full_like(qkv, np.nan)
    ref.attention_backward(dqkv, dout, qkv, out, lse, NH)
    assert_is_gradient(dqkv, loss, qkv)


@each_dtype
def test_attention_sees_no_later_token(dtype):
    noise = Noise(dtype)
    B, T, C, NH = 1, 100, 6, 2
    qkv, out, lse = noise(B, T, 3 * C), noise.nan(B, T, C), noise.nan(B, NH, T)
    ref.attention_forward(out, lse, qkv, NH)
    kept = out.copy()
    qkv[:, 97:] *= 1000
    ref.attention_forward(out, lse, qkv, NH)
    np.testing.assert_array_equal(out[:, :97], kept[:, :97])


@each_dtype
def test_attention_stands_scores_of_a_thousand(dtype):
    noise = Noise(dtype)
    B, T, C, NH = 1, 20, 8, 2
    qkv, out, lse = 40 * noise(B, T, 3 * C), noise.nan(B, T, C), noise.nan(B, NH, T)
    ref.attention_forward(out, lse, qkv, NH)
    q, k, v = split(f64(qkv), NH)
    att = softmax_truth(causal(q @ k.swapaxes(2, 3) / 2))
    np.testing.assert_allclose(out, join(att @ v), atol=1e-2 if dtype == np.float32 else 1e-9)
    assert np.isfinite(lse).all()


@each_dtype
@each_shape
def test_permute_and_unpermute_move_every_number_there_and_back(shape, dtype):
    B, T, C, NH = shape
    noise = Noise(dtype)
    qkv, head = noise(B, T, 3 * C), (B, NH, T, C // NH)
    q, k, v, dqkv = noise.nan(*head), noise.nan(*head), noise.nan(*head), noise.nan(B, T, 3 * C)
    ref.permute_forward(q, k, v, qkv)
    for actual, truth in zip((q, k, v), split(qkv, NH), strict=True):
        np.testing.assert_array_equal(actual, truth)
    ref.permute_backward(dqkv, q, k, v)
    np.testing.assert_array_equal(dqkv, qkv)
    out, dinp = noise.nan(B, T, C), noise.nan(*head)
    ref.unpermute_forward(out, q)
    np.testing.assert_array_equal(out, join(q))
    ref.unpermute_backward(dinp, out)
    np.testing.assert_array_equal(dinp, q)


@each_dtype
@each_shape
def test_trimat_forward_writes_the_lower_triangle_alone(shape, dtype):
    B, T, C, NH = shape
    noise = Noise(dtype)
    qkv, preatt = noise(B, T, 3 * C), noise.nan(B, NH, T, T)
    ref.trimat_forward(preatt, qkv, NH)
    q, k, _ = split(f64(qkv), NH)
    lower = np.tril(np.ones((T, T), bool))
    assert_agrees(preatt[..., lower], (np.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(C // NH))[..., lower])
    assert np.isnan(preatt[..., ~lower]).all()


@each_dtype
@each_shape
def test_softmax_autoregressive(shape, dtype):
    B, T, _, NH = shape
    noise = Noise(dtype)
    preatt, datt, att, dpreatt = noise(B, NH, T, T), noise(B, NH, T, T), noise.nan(B, NH, T, T), noise.nan(B, NH, T, T)
    preatt[..., ~np.tril(np.ones((T, T), bool))] = np.nan  # never read, as trimat_forward never writes it
    scale = 0.3
    ref.softmax_autoregressive_forward(att, preatt, scale)
    att_truth = softmax_truth(causal(scale * f64(preatt)))
    assert_agrees(att, att_truth)
    ref.softmax_autoregressive_backward(dpreatt, datt, att_truth.astype(dtype), scale)
    jacobian = np.einsum("...i,ij->...ij", att_truth, np.eye(T)) - np.einsum("...i,...j->...ij", att_truth, att_truth)
    assert_agrees(dpreatt, scale * np.einsum("...ij,...j->...i", jacobian, f64(datt)))
    assert not att[..., ~np.tril(np.ones((T, T), bool))].any()
    assert not dpreatt[..., ~np.tril(np.ones((T, T), bool))].any()


def test_softmax_autoregressive_backward_is_the_gradient():
    noise = Noise(np.float64)
    shape = (1, 2, 5, 5)
    preatt, datt, att, dpreatt = noise(*shape), noise(*shape), noise.nan(*shape), noise.nan(*shape)

    def loss():
        ref.softmax_autoregressive_forward(att, preatt, 0.7)
        return np.vdot(att, datt)

    loss()
    ref.softmax_autoregressive_backward(dpreatt, datt, att, 0.7)
    assert_is_gradient(dpreatt, loss, preatt)


# ---------------------------------------------------------------------------------------------------------------------
# softmax, crossentropy, classifier


@each_dtype
@each_rows
@pytest.mark.parametrize("size", [1, 100])
def test_softmax_forward(size, rows, dtype):
    N, C = rows
    noise = Noise(dtype)
    inp, out = dtype(size) * noise(N, C), noise.nan(N, C)
    ref.softmax_forward(out, inp)
    assert_agrees(out, softmax_truth(f64(inp)))


VOCABULARIES = [(1, 1, 1), (1, 3, 3), (5, 3, 8), (40, 501, 512)]  # (N, V, Vp)
each_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)


@each_dtype
@each_vocabulary
def test_crossentropy_forward(vocabulary, dtype):
    N, V, Vp = vocabulary
    noise = Noise(dtype)
    probs, targets, losses = softmax_truth(f64(noise(N, Vp))).astype(dtype), noise.tokens(V, N), noise.nan(N)
    ref.crossentropy_forward(losses, probs, targets)
    assert_agrees(losses, -np.einsum("nv,nv->n", onehot(targets, Vp), np.log(f64(probs))))


@each_dtype
@each_vocabulary
def test_crossentropy_softmax_backward_adds_and_leaves_the_padded_columns(vocabulary, dtype):
    N, V, Vp = vocabulary
    noise = Noise(dtype)
    probs, targets, dlosses, dlogits = noise.nan(N, Vp), noise.tokens(V, N), noise(N), noise(N, Vp)
    probs[:, :V] = softmax_truth(f64(noise(N, V)))
    padding = dlogits[:, V:].copy()
    truth = f64(dlogits[:, :V]) + np.einsum("nv,n->nv", f64(probs[:, :V]) - onehot(targets, V), f64(dlosses))
    ref.crossentropy_softmax_backward(dlogits, dlosses, probs, targets, V)
    assert_agrees(dlogits[:, :V], truth)
    np.testing.assert_array_equal(dlogits[:, V:], padding)


@each_dtype
@each_vocabulary
def test_fused_classifier_never_reads_the_padded_columns_and_zeros_them(vocabulary, dtype):
    N, V, Vp = vocabulary
    noise = Noise(dtype)
    logits, targets, losses, dloss = 3 * noise(N, Vp), noise.tokens(V, N), noise.nan(N), 1 / N
    logits[:, V:] = np.nan
    probs = softmax_truth(f64(logits[:, :V]))
    ref.fused_classifier(logits, losses, dloss, targets, V)
    assert_agrees(losses, -np.log(probs[np.arange(N), targets]))
    assert_agrees(logits[:, :V], (probs - onehot(targets, V)) * dloss)
    assert not logits[:, V:].any()


def test_classifier_gradients_are_the_gradient():
    noise = Noise(np.float64)
    N, V, Vp = 3, 5, 8
    logits, targets, losses, probs = noise(N, Vp), noise.tokens(V, N), noise.nan(N), np.zeros((N, Vp))
    logits[:, V:] = -np.inf  # outside the vocabulary: no probability

    def loss():
        ref.softmax_forward(probs, logits)
        ref.crossentropy_forward(losses, probs, targets)
        return losses.mean()

    numeric = finite_difference(loss, logits[:, :V])
    dlogits = np.zeros((N, Vp))
    ref.crossentropy_softmax_backward(dlogits, np.full(N, 1 / N), probs, targets, V)
    np.testing.assert_allclose(dlogits[:, :V], numeric, rtol=1e-6, atol=1e-8)
    loss()
    separate = losses.copy()
    ref.fused_classifier(logits, losses, 1 / N, targets, V)
    np.testing.assert_allclose(logits[:, :V], numeric, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(losses, separate, rtol=1e-7)


@each_dtype
def test_a_nan_logit_makes_the_loss_nan(dtype):
    logits = Noise(dtype)(2, 300)
    logits[1, 77] = np.nan
    losses = np.zeros(2, dtype)
    ref.fused_classifier(logits, losses, 1.0, np.array([5, 5], np.int32), 300)
    assert np.isfinite(losses[0]) and np.isnan(losses[1])


# ---------------------------------------------------------------------------------------------------------------------
# AdamW and the norm


def adamw_truth(params, grads, m, v, step, learning_rate, beta1, beta2, eps, weight_decay):
    m = beta1 * m + (1 - beta1) * grads
    v = beta2 * v + (1 - beta2) * grads**2
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    decayed = params * (1 - learning_rate * weight_decay)
    return decayed - learning_rate * m_hat / (np.sqrt(v_hat) + eps), m, v


@each_dtype
@pytest.mark.parametrize("size", [1, 3, 5000])
@pytest.mark.parametrize("first", [1, 1000, 2**31 - 5])
def test_adamw_update_over_five_steps(first, size, dtype):
    noise = Noise(dtype)
    params, m, v = noise(size), noise(size) * (first > 1), noise(size) ** 2 * (first > 1)
    truth = f64(params, m, v)
    for step in range(first, first + 5):
        grads, scale, learning_rate = noise(size), noise(1) ** 2, np.array([1e-2 / (step % 7 + 1)], dtype)
        ref.adamw_update(
            params, grads, m, v, np.array([step], np.int32), learning_rate, scale, 0.9, 0.95, 1e-8, 0.1
        )  # fmt: skip
        truth = adamw_truth(
            truth[0], f64(grads) * f64(scale), truth[1], truth[2], step, f64(learning_rate), 0.9, 0.95, 1e-8, 0.1
        )
        for actual, expected in zip((params, m, v), truth, strict=True):
            assert_agrees(actual, expected)


@each_dtype
def test_adamw_moves_by_the_learning_rate_at_its_first_step(dtype):
    noise = Noise(dtype)
    params, grads = noise(100), noise(100)
    before, one = params.copy(), np.ones(1, dtype)
    zeros = np.zeros(100, dtype), np.zeros(100, dtype)
    rate = np.array([0.5], dtype)
    ref.adamw_update(params, grads, *zeros, np.array([1], np.int32), rate, one, 0.9, 0.999, 1e-8, 0.0)
    np.testing.assert_allclose(before - params, 0.5 * np.sign(grads), rtol=1e-4)


@each_dtype
@pytest.mark.parametrize("size", [1, 3, 65536, 200_001])
def test_global_norm_squared(size, dtype):
    noise = Noise(dtype)
    inp, out = noise(size), noise.nan(1)
    ref.global_norm_squared(out, inp)
    assert_agrees(out, np.einsum("i,i->", f64(inp), f64(inp))[None])


# ---------------------------------------------------------------------------------------------------------------------
# repeatability


@pytest.mark.parametrize(
    "pass_",
    ["encoder_backward", "layernorm_backward", "matmul_backward_bias", "attention_backward", "global_norm_squared"],
)
def test_sums_are_the_same_bits_at_any_number_of_threads(pass_):
    B, T, C, NH = 2, 150, 96, 3
    N = B * T

    def run(threads):
        noise = Noise(np.float32)
        outputs, inputs = {
            "encoder_backward": ([noise(9, C), noise(T, C)], [noise(B, T, C), noise.tokens(9, B, T)]),
            "layernorm_backward": (
                [noise(N, C), noise(C), noise(C)],
                [noise(N, C), noise(N, C), noise(C), noise(N), noise(N)],
            ),
            "matmul_backward_bias": ([noise(C)], [noise(N, C)]),
            "attention_backward": (
                [noise.nan(B, T, 3 * C)],
                [noise(B, T, C), noise(B, T, 3 * C), noise(B, T, C), noise(B, NH, T) + 5, NH],
            ),
            "global_norm_squared": ([noise.nan(1)], [noise(300_000)]),
        }[pass_]
        numba.set_num_threads(threads)
        getattr(ref, pass_)(*outputs, *inputs)
        return outputs

    available = numba.get_num_threads()
    try:
        first, *others = [run(threads) for threads in (1, available, available)]
    finally:
        numba.set_num_threads(available)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
