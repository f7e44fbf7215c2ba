"""The square of the global norm of the gradient, for clipping: out = sum of inp^2.

version 1: one block, and a tree of additions in shared memory
"""

import numpy as np

import cpu_reference
from kernels.device import cuda, float32
from kernels.op import Op

global_norm_squared = Op(
    reference=cpu_reference.global_norm_squared,
    inputs=lambda rng, N: {"inp": rng.standard_normal(N, dtype=np.float32)},
    outputs=lambda N: {"out": 1},
    bytes_moved=lambda N: 4 * N,
    shape={"N": 124_475_904},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 4099)],
)


@cuda.jit(cache=True, fastmath=True)
def global_norm_squared_kernel1(out, inp):
    shared = cuda.shared.array(1024, float32)
    tid = cuda.threadIdx.x
    total = float32(0)
    for i in range(tid, inp.size, cuda.blockDim.x):
        total += inp[i] * inp[i]
    shared[tid] = total
    half = cuda.blockDim.x // 2
    while half > 0:
        cuda.syncthreads()
        if tid < half:
            shared[tid] += shared[tid + half]
        half //= 2
    if tid == 0:
        out[0] = shared[0]


@global_norm_squared.version(1, "one block, and a tree of additions in shared memory")
def global_norm_squared1(out, inp, *, block_size=1024, stream=0):
    """out: float32 (1,); inp: float32 (N,), on the device; block_size a power of two."""
    global_norm_squared_kernel1[1, block_size, stream](out, inp)
