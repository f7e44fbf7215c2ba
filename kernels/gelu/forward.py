"""GELU forward (Hendrycks and Gimpel 2016), the tanh form: out = 0.5 inp (1 + tanh(sqrt(2/pi) (inp + 0.044715 inp^3))).

version 1: a thread an element
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32
from kernels.op import Op

gelu_forward = Op(
    reference=cpu_reference.gelu_forward,
    inputs=lambda rng, N: {"inp": rng.standard_normal(N, dtype=np.float32)},
    outputs=lambda N: {"out": N},
    bytes_moved=lambda N: 8 * N,  # inp read once, out written once
    shape={"N": 8 * 1024 * 768},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 4099)],
    trainer_shapes=[{"N": 4 * 1024 * 3072}],
)

SQRT_2_OVER_PI = float32(math.sqrt(2 / math.pi))  # float32 here, or the whole kernel computes in float64


@cuda.jit(device=True, cache=True)
def gelu_tanh(x):
    return float32(0.5) * x * (float32(1) + math.tanh(SQRT_2_OVER_PI * (x + float32(0.044715) * x * x * x)))


@cuda.jit(cache=True)
def gelu_forward_kernel1(out, inp):
    i = cuda.grid(1)
    if i < inp.size:
        out[i] = gelu_tanh(inp[i])


@gelu_forward.version(1, "a thread an element")
def gelu_forward1(out, inp, *, block_size=256, stream=0):
    """out, inp: float32 (N,) on the device."""
    gelu_forward_kernel1[ceil_div(inp.size, block_size), block_size, stream](out, inp)
