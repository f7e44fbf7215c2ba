"""GELU backward: dinp = dout * gelu'(inp).

version 1: a thread an element
version 2: a thread four neighbouring elements, 16 bytes a load and a store: a quarter of the memory instructions
version 3: the tanh out of one exponential and one reciprocal, an instruction each: less arithmetic
version 4: four independent 16-byte loads a thread, issued before the first is needed: more bytes on their way
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, exp2_approx, float32, load4, rcp_approx, store4
from kernels.gelu.forward import gelu_forward
from kernels.gelu.gate import CUBIC, LINEAR, SQRT_2_OVER_PI
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
    large=gelu_forward.large,
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
    """dinp, inp, dout: float32 (N,) on the device; dinp may be dout."""
    gelu_backward_kernel1[ceil_div(inp.size, block_size), block_size, stream](dinp, inp, dout)


@cuda.jit(device=True, cache=True)
def gelu_slope_tanh4(x):
    return gelu_slope_tanh(x[0]), gelu_slope_tanh(x[1]), gelu_slope_tanh(x[2]), gelu_slope_tanh(x[3])


@cuda.jit(cache=True)
def gelu_backward_kernel2(dinp, inp, dout):
    i = 4 * cuda.grid(1)
    if i + 3 < inp.size:
        a, b, c, d = gelu_slope_tanh4(load4(inp, i))
        da, db, dc, dd = load4(dout, i)
        store4(dinp, i, a * da, b * db, c * dc, d * dd)
    else:
        for j in range(i, inp.size):  # the last one to three
            dinp[j] = gelu_slope_tanh(inp[j]) * dout[j]


@gelu_backward.version(2, "16-byte loads and stores")
def gelu_backward2(dinp, inp, dout, *, block_size=256, stream=0):
    """dinp, inp, dout: float32 (N,) on the device, 16-byte aligned; dinp may be dout."""
    gelu_backward_kernel2[ceil_div(inp.size, 4 * block_size), block_size, stream](dinp, inp, dout)


# With w = 2 sqrt(2/pi) (x + 0.044715 x^3) and the logistic function s(w) = 1 / (1 + exp(-w)), gelu = x s(w). So
# gelu' = s(w) + x s(w) (1 - s(w)) dw/dx, where 1 - s(w) = exp(-w) s(w) loses no digits if written so.
DW_LINEAR = float32(2 * math.sqrt(2 / math.pi))
DW_CUBIC = float32(3 * 2 * math.sqrt(2 / math.pi) * 0.044715)


@cuda.jit(device=True, cache=True, fastmath=True)
def gelu_slope(x):
    power = exp2_approx(min(x * (LINEAR + CUBIC * x * x), float32(126)))  # finite, since infinity times zero is NaN
    gate = rcp_approx(float32(1) + power)
    return gate + x * gate * (power * gate) * (DW_LINEAR + DW_CUBIC * x * x)


@cuda.jit(device=True, cache=True, fastmath=True)
def gelu_slope4(x, d):
    """Four elements of dinp from four of inp and of dout."""
    return gelu_slope(x[0]) * d[0], gelu_slope(x[1]) * d[1], gelu_slope(x[2]) * d[2], gelu_slope(x[3]) * d[3]


@cuda.jit(cache=True, fastmath=True)
def gelu_backward_kernel3(dinp, inp, dout):
    i = 4 * cuda.grid(1)
    if i + 3 < inp.size:
        store4(dinp, i, *gelu_slope4(load4(inp, i), load4(dout, i)))
    else:
        for j in range(i, inp.size):
            dinp[j] = gelu_slope(inp[j]) * dout[j]


@gelu_backward.version(3, "the tanh out of one ex2.approx and one rcp.approx")
def gelu_backward3(dinp, inp, dout, *, block_size=256, stream=0):
    """dinp, inp, dout: float32 (N,) on the device, 16-byte aligned; dinp may be dout."""
    gelu_backward_kernel3[ceil_div(inp.size, 4 * block_size), block_size, stream](dinp, inp, dout)


@cuda.jit(cache=True, fastmath=True)
def gelu_backward_kernel4(dinp, inp, dout):
    step = 4 * cuda.blockDim.x
    start = cuda.blockIdx.x * 2 * step  # a block owns two rounds of its threads
    i = start + 4 * cuda.threadIdx.x
    if start + 2 * step <= inp.size:
        x0 = load4(inp, i)
        d0 = load4(dout, i)
        x1 = load4(inp, i + step)
        d1 = load4(dout, i + step)
        store4(dinp, i, *gelu_slope4(x0, d0))
        store4(dinp, i + step, *gelu_slope4(x1, d1))
    else:
        for j in range(start + cuda.threadIdx.x, inp.size, cuda.blockDim.x):
            dinp[j] = gelu_slope(inp[j]) * dout[j]


@gelu_backward.version(4, "four independent 16-byte loads a thread")
def gelu_backward4(dinp, inp, dout, *, block_size=128, stream=0):
    """dinp, inp, dout: float32 (N,) on the device, 16-byte aligned; dinp may be dout."""
    gelu_backward_kernel4[ceil_div(inp.size, 8 * block_size), block_size, stream](dinp, inp, dout)
