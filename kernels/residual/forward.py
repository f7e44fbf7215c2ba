"""Residual connection: out = inp1 + inp2. (Fused with the layernorm that follows it: kernels/layernorm.)

version 1: a thread an element
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.op import Op

residual_forward = Op(
    reference=cpu_reference.residual_forward,
    inputs=lambda rng, N: {name: rng.standard_normal(N, dtype=np.float32) for name in ("inp1", "inp2")},
    outputs=lambda N: {"out": N},
    bytes_moved=lambda N: 12 * N,
    shape={"N": 8 * 1024 * 768},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 4099)],
    trainer_shapes=[{"N": 4 * 1024 * 768}],
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
