"""Cross-entropy forward: losses = -log probs[target], a number a row, in nats.

The story is told in doc/crossentropy.md.

version 1: a thread a row
version 2: blocks of one warp, so that all multiprocessors take part
"""

import math

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda
from kernels.op import Op


def crossentropy_inputs(rng, N, V, Vp):
    probs = np.full((N, Vp), np.nan, np.float32)  # the padding is not read
    probs[:, :V] = np.exp(rng.standard_normal((N, V), dtype=np.float32))
    probs[:, :V] /= probs[:, :V].sum(1, keepdims=True)
    return {"probs": probs, "targets": rng.integers(0, V, N).astype(np.int32)}


SHAPES = {
    "shape": {"N": 4096, "V": 50257, "Vp": 50304},
    "small": {"N": 3, "V": 97, "Vp": 128},
    "odd": [
        {"N": N, "V": V, "Vp": Vp}
        for N, V, Vp in ((1, 1, 1), (2, 1, 4), (33, 33, 33), (2, 100, 101), (2, 1001, 1024), (1, 4099, 4224))
    ],
}

crossentropy_forward = Op(
    reference=cpu_reference.crossentropy_forward,
    inputs=crossentropy_inputs,
    outputs=lambda N, V, Vp: {"losses": N},
    bytes_moved=lambda N, V, Vp: 4 * 3 * N,  # a target, a probability and a loss a row
    **SHAPES,
)


@cuda.jit(cache=True)
def crossentropy_forward_kernel(losses, probs, targets):
    row = cuda.grid(1)
    if row < losses.size:
        losses[row] = -math.log(probs[row, targets[row]])


@crossentropy_forward.version(1, "a thread a row")
def crossentropy_forward1(losses, probs, targets, *, block_size=256, stream=0):
    """losses: float32 (N,); probs: float32 (N, Vp); targets: int32 (N,) below V."""
    crossentropy_forward_kernel[ceil_div(losses.size, block_size), block_size, stream](losses, probs, targets)


@crossentropy_forward.version(2, "a thread a row in blocks of one warp: all multiprocessors take part")
def crossentropy_forward2(losses, probs, targets, *, stream=0):
    crossentropy_forward1(losses, probs, targets, block_size=32, stream=stream)
