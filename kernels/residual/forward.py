"""Residual connection: out = inp1 + inp2. (Fused with the layernorm that follows it: kernels/layernorm.)

version 1: a thread an element
version 2: a thread four neighbouring elements, 16 bytes a load and a store: a quarter of the memory instructions
version 3: four independent 16-byte loads a thread, issued before the first is needed: more bytes on their way
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, load4, store4
from kernels.op import Op
from kernels.reduce import add4

residual_forward = Op(
    reference=cpu_reference.residual_forward,
    inputs=lambda rng, N: {name: rng.standard_normal(N, dtype=np.float32) for name in ("inp1", "inp2")},
    outputs=lambda N: {"out": N},
    bytes_moved=lambda N: 12 * N,
    shape={"N": 8 * 1024 * 768},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 4099)],
    trainer_shapes=[{"N": 4 * 1024 * 768}],
    large=[{"N": 1 << 28}],
)


@cuda.jit(cache=True, fastmath=True)
def residual_forward_kernel1(out, inp1, inp2):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = inp1[i] + inp2[i]


@residual_forward.version(1, "a thread an element")
def residual_forward1(out, inp1, inp2, *, block_size=256, stream=0):
    """out, inp1, inp2: float32 (N,) on the device."""
    residual_forward_kernel1[ceil_div(out.size, block_size), block_size, stream](out, inp1, inp2)


@cuda.jit(cache=True, fastmath=True)
def residual_forward_kernel2(out, inp1, inp2):
    i = 4 * cuda.grid(1)
    if i + 3 < out.size:
        store4(out, i, *add4(load4(inp1, i), load4(inp2, i)))
    else:
        for j in range(i, out.size):  # the last one to three
            out[j] = inp1[j] + inp2[j]


@residual_forward.version(2, "16-byte loads and stores")
def residual_forward2(out, inp1, inp2, *, block_size=256, stream=0):
    """out, inp1, inp2: float32 (N,) on the device, 16-byte aligned."""
    residual_forward_kernel2[ceil_div(out.size, 4 * block_size), block_size, stream](out, inp1, inp2)


@cuda.jit(cache=True, fastmath=True)
def residual_forward_kernel3(out, inp1, inp2):
    step = 4 * cuda.blockDim.x
    start = cuda.blockIdx.x * 2 * step  # a block owns two rounds of its threads
    i = start + 4 * cuda.threadIdx.x
    if start + 2 * step <= out.size:
        a0 = load4(inp1, i)
        b0 = load4(inp2, i)
        a1 = load4(inp1, i + step)
        b1 = load4(inp2, i + step)
        store4(out, i, *add4(a0, b0))
        store4(out, i + step, *add4(a1, b1))
    else:
        for j in range(start + cuda.threadIdx.x, out.size, cuda.blockDim.x):
            out[j] = inp1[j] + inp2[j]


@residual_forward.version(3, "four independent 16-byte loads a thread")
def residual_forward3(out, inp1, inp2, *, block_size=128, stream=0):
    """out, inp1, inp2: float32 (N,) on the device, 16-byte aligned."""
    residual_forward_kernel3[ceil_div(out.size, 8 * block_size), block_size, stream](out, inp1, inp2)
