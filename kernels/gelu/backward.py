"""GELU backward: dinp = dout * gelu'(inp).

version 1: a thread an element
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32
from kernels.gelu.forward import SQRT_2_OVER_PI, gelu_forward
from kernels.op import Op

gelu_backward = Op(
    reference=cpu_reference.gelu_backward,
    inputs=lambda rng, N: {name: rng.standard_normal(N, dtype=np.float32) for name in ("inp", "dout")},
    outputs=lambda N: {"dinp": N},
    bytes_moved=lambda N: 12 * N,  # inp and dout read once, dinp written once
    shape=gelu_forward.shape,
    small=gelu_forward.small,
    odd=gelu_forward.odd,
    trainer_shapes=gelu_forward.trainer_shapes,
)


@cuda.jit(device=True, cache=True)
def gelu_slope_tanh(x):
    """gelu'(x), with the derivative of tanh as 1 - tanh^2."""
    tanh = math.tanh(SQRT_2_OVER_PI * (x + float32(0.044715) * x * x * x))
    inner = SQRT_2_OVER_PI * (float32(1) + float32(3 * 0.044715) * x * x)
    return float32(0.5) * (float32(1) + tanh) + float32(0.5) * x * (float32(1) - tanh * tanh) * inner


@cuda.jit(cache=True)
def gelu_backward_kernel1(dinp, inp, dout):
    i = cuda.grid(1)
    if i < inp.size:
        dinp[i] = gelu_slope_tanh(inp[i]) * dout[i]


@gelu_backward.version(1, "a thread an element")
def gelu_backward1(dinp, inp, dout, *, block_size=256, stream=0):
    """dinp, inp, dout: float32 (N,) on the device."""
    gelu_backward_kernel1[ceil_div(inp.size, block_size), block_size, stream](dinp, inp, dout)
