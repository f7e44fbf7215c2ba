"""The bias gradient of a matmul: dbias += the column sums of dout.

version 1: a thread a column
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32
from kernels.op import Op

matmul_backward_bias = Op(
    reference=cpu_reference.matmul_backward_bias,
    inputs=lambda rng, N, OC: {
        "dbias": rng.standard_normal(OC, dtype=np.float32),
        "dout": rng.standard_normal((N, OC), dtype=np.float32),
    },
    outputs=lambda N, OC: {},
    changed=("dbias",),
    bytes_moved=lambda N, OC: 4 * (N * OC + 2 * OC),
    shape={"N": 8192, "OC": 3072},
    small={"N": 40, "OC": 100},
    odd=[{"N": N, "OC": OC} for N, OC in ((1, 768), (7, 1), (7, 3), (33, 33), (5, 768), (3, 1601), (100, 64))],
    trainer_shapes=[{"N": 4096, "OC": 3072}, {"N": 4096, "OC": 2304}],
)


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_bias_kernel1(dbias, dout):
    column = cuda.grid(1)
    N, OC = dout.shape
    if column < OC:
        total = float32(0)
        for row in range(N):
            total += dout[row, column]
        dbias[column] += total


@matmul_backward_bias.version(1, "a thread a column")
def matmul_backward_bias1(dbias, dout, *, block_size=128, stream=0):
    """dbias: float32 (OC,), added to; dout: float32 (N, OC)."""
    blocks = ceil_div(dbias.size, block_size)
    matmul_backward_bias_kernel1[blocks, block_size, stream](dbias, dout)
