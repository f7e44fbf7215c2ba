"""LayerNorm forward: out = (inp - mean) * rstd * weight + bias, mean and rstd over the C channels of each row.

version 1: a thread a row
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32
from kernels.op import Op


def layernorm_inputs(rng, N, C):
    return {
        "inp": rng.standard_normal((N, C), dtype=np.float32),
        "weight": rng.standard_normal(C, dtype=np.float32),
        "bias": rng.standard_normal(C, dtype=np.float32),
    }


layernorm_forward = Op(
    reference=cpu_reference.layernorm_forward,
    inputs=layernorm_inputs,
    outputs=lambda N, C: {"out": (N, C), "mean": N, "rstd": N},
    bytes_moved=lambda N, C: 4 * (2 * N * C + 2 * N + 2 * C),
    shape={"N": 8192, "C": 768},
    small={"N": 6, "C": 100},
    odd=[{"N": 3, "C": C} for C in (1, 3, 33, 100, 768, 1600, 1601)] + [{"N": 1, "C": 768}],
    trainer_shapes=[{"N": 4096, "C": 768}],
)

EPS = float32(1e-5)


@cuda.jit(cache=True, fastmath=True)
def layernorm_forward_kernel1(out, mean, rstd, inp, weight, bias):
    row = cuda.grid(1)
    N, C = inp.shape
    if row < N:
        m = float32(0)
        for c in range(C):
            m += inp[row, c]
        m /= float32(C)
        v = float32(0)
        for c in range(C):
            v += (inp[row, c] - m) ** 2
        s = float32(1) / math.sqrt(v / float32(C) + EPS)
        for c in range(C):
            out[row, c] = (inp[row, c] - m) * s * weight[c] + bias[c]
        mean[row] = m
        rstd[row] = s


@layernorm_forward.version(1, "a thread a row")
def layernorm_forward1(out, mean, rstd, inp, weight, bias, *, block_size=128, stream=0):
    """out, inp: float32 (N, C); mean, rstd: (N,); weight, bias: (C,), on the device."""
    N = inp.shape[0]
    layernorm_forward_kernel1[ceil_div(N, block_size), block_size, stream](out, mean, rstd, inp, weight, bias)
