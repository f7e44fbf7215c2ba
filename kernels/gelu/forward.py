"""GELU forward (Hendrycks and Gimpel 2016), the tanh form: out = 0.5 inp (1 + tanh(sqrt(2/pi) (inp + 0.044715 inp^3))).

version 1: a thread an element
version 2: a thread four neighbouring elements, 16 bytes a load and a store: a quarter of the memory instructions
version 3: the tanh out of one exponential and one reciprocal, an instruction each: less arithmetic
version 4: four independent 16-byte loads a thread, issued before the first is needed: more bytes on their way
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32, load4, store4
from kernels.gelu.gate import SQRT_2_OVER_PI, gelu_gate
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
    large=[{"N": 1 << 28}],
)

# No fastmath: it would make math.tanh the instruction tanh.approx, whose relative error of 2^-11 is 50 times too large.
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


@cuda.jit(cache=True)
def gelu_forward_kernel2(out, inp):
    i = 4 * cuda.grid(1)
    if i + 3 < inp.size:
        a, b, c, d = load4(inp, i)
        store4(out, i, gelu_tanh(a), gelu_tanh(b), gelu_tanh(c), gelu_tanh(d))
    else:
        for j in range(i, inp.size):  # the last one to three
            out[j] = gelu_tanh(inp[j])


@gelu_forward.version(2, "16-byte loads and stores")
def gelu_forward2(out, inp, *, block_size=256, stream=0):
    """out, inp: float32 (N,) on the device, 16-byte aligned."""
    gelu_forward_kernel2[ceil_div(inp.size, 4 * block_size), block_size, stream](out, inp)


@cuda.jit(device=True, cache=True, fastmath=True)
def gelu(x):
    return x * gelu_gate(x)


@cuda.jit(device=True, cache=True, fastmath=True)
def gelu4(x):
    return gelu(x[0]), gelu(x[1]), gelu(x[2]), gelu(x[3])


@cuda.jit(cache=True, fastmath=True)
def gelu_forward_kernel3(out, inp):
    i = 4 * cuda.grid(1)
    if i + 3 < inp.size:
        store4(out, i, *gelu4(load4(inp, i)))
    else:
        for j in range(i, inp.size):
            out[j] = gelu(inp[j])


@gelu_forward.version(3, "the tanh out of one ex2.approx and one rcp.approx")
def gelu_forward3(out, inp, *, block_size=256, stream=0):
    """out, inp: float32 (N,) on the device, 16-byte aligned."""
    gelu_forward_kernel3[ceil_div(inp.size, 4 * block_size), block_size, stream](out, inp)


@cuda.jit(cache=True, fastmath=True)
def gelu_forward_kernel4(out, inp):
    step = 4 * cuda.blockDim.x
    start = cuda.blockIdx.x * 4 * step  # a block owns four rounds of its threads
    i = start + 4 * cuda.threadIdx.x
    if start + 4 * step <= inp.size:
        x0 = load4(inp, i)
        x1 = load4(inp, i + step)
        x2 = load4(inp, i + 2 * step)
        x3 = load4(inp, i + 3 * step)
        store4(out, i, *gelu4(x0))
        store4(out, i + step, *gelu4(x1))
        store4(out, i + 2 * step, *gelu4(x2))
        store4(out, i + 3 * step, *gelu4(x3))
    else:
        for j in range(start + cuda.threadIdx.x, inp.size, cuda.blockDim.x):
            out[j] = gelu(inp[j])


@gelu_forward.version(4, "four independent 16-byte loads a thread")
def gelu_forward4(out, inp, *, block_size=128, stream=0):
    """out, inp: float32 (N,) on the device, 16-byte aligned."""
    gelu_forward_kernel4[ceil_div(inp.size, 16 * block_size), block_size, stream](out, inp)
