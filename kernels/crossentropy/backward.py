"""The gradient of cross-entropy through softmax: dlogits += (probs - onehot(target)) * dlosses, in the columns below V.

The story is told in doc/crossentropy.md. The padding, columns V to Vp - 1, is neither read nor written.

version 1: a thread an element, which divides to find its row
version 2: a block in a row: no division, and the row's target and loss gradient are read at once by all
version 3: 16-byte loads and stores
version 4: four pieces a thread: eight independent loads in flight
version 5: the target's column apart: nothing but a multiply-add an element
"""

import numpy as np

import cpu_reference
from kernels.crossentropy.forward import SHAPES, crossentropy_inputs
from kernels.device import ceil_div, cuda, float32, load4, store4
from kernels.op import Op


def backward_inputs(rng, N, V, Vp):
    return {
        "dlogits": rng.standard_normal((N, Vp), dtype=np.float32) / N,  # the padding too: it has to stay as it is
        "dlosses": rng.standard_normal(N, dtype=np.float32),
        "V": V,
        **crossentropy_inputs(rng, N, V, Vp),
    }


crossentropy_softmax_backward = Op(
    reference=cpu_reference.crossentropy_softmax_backward,
    inputs=backward_inputs,
    outputs=lambda N, V, Vp: {},
    changed=("dlogits",),
    bytes_moved=lambda N, V, Vp: 4 * N * (3 * V + 2),
    **SHAPES,
)


@cuda.jit(cache=True, fastmath=True)
def crossentropy_softmax_backward_kernel1(dlogits, dlosses, probs, targets, V):
    i = cuda.grid(1)
    N = dlosses.size
    if i < N * V:
        row, v = i // V, i % V
        onehot = float32(1 if v == targets[row] else 0)
        dlogits[row, v] += (probs[row, v] - onehot) * dlosses[row]


@crossentropy_softmax_backward.version(1, "a thread an element")
def crossentropy_softmax_backward1(dlogits, dlosses, probs, targets, V, *, block_size=256, stream=0):
    """dlogits, probs: float32 (N, Vp); dlosses: (N,), 1/N for a mean; targets: int32 (N,) below V."""
    blocks = ceil_div(dlosses.size * V, block_size)
    crossentropy_softmax_backward_kernel1[blocks, block_size, stream](dlogits, dlosses, probs, targets, V)


@cuda.jit(cache=True, fastmath=True)
def crossentropy_softmax_backward_kernel2(dlogits, dlosses, probs, targets, V):
    row, v = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if v < V:
        onehot = float32(1 if v == targets[row] else 0)
        dlogits[row, v] += (probs[row, v] - onehot) * dlosses[row]


@crossentropy_softmax_backward.version(2, "a block in a row, no division")
def crossentropy_softmax_backward2(dlogits, dlosses, probs, targets, V, *, block_size=256, stream=0):
    grid = dlosses.size, ceil_div(V, block_size)
    crossentropy_softmax_backward_kernel2[grid, block_size, stream](dlogits, dlosses, probs, targets, V)


@cuda.jit(device=True, cache=True, fastmath=True)
def add_ragged(dlogits, dlosses, probs, targets, row, V):
    """The up to three columns after the last whole piece, by threads of the row's first block."""
    if cuda.blockIdx.y == 0 and cuda.threadIdx.x < (V & 3):
        v = V - 1 - cuda.threadIdx.x
        onehot = float32(1 if v == targets[row] else 0)
        dlogits[row, v] += (probs[row, v] - onehot) * dlosses[row]


@cuda.jit(cache=True, fastmath=True)
def crossentropy_softmax_backward_kernel3(dlogits, dlosses, probs, targets, V):
    row, v = cuda.blockIdx.x, 4 * (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
    if v + 3 < V:
        i = row * dlogits.shape[1] + v
        scale, target = dlosses[row], targets[row]
        a, b, c, d = load4(dlogits, i)
        p, q, r, s = load4(probs, i)
        a += (p - float32(1 if v == target else 0)) * scale
        b += (q - float32(1 if v + 1 == target else 0)) * scale
        c += (r - float32(1 if v + 2 == target else 0)) * scale
        d += (s - float32(1 if v + 3 == target else 0)) * scale
        store4(dlogits, i, a, b, c, d)
    add_ragged(dlogits, dlosses, probs, targets, row, V)


@crossentropy_softmax_backward.version(3, "16-byte loads and stores")
def crossentropy_softmax_backward3(dlogits, dlosses, probs, targets, V, *, block_size=256, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 2."""
    if dlogits.shape[1] % 4:
        crossentropy_softmax_backward2(dlogits, dlosses, probs, targets, V, block_size=block_size, stream=stream)
        return
    grid = dlosses.size, ceil_div(V, 4 * block_size)
    crossentropy_softmax_backward_kernel3[grid, block_size, stream](dlogits, dlosses, probs, targets, V)


PIECES = 4  # of 16 bytes, that a thread has on their way, of dlogits and of probs


@cuda.jit(cache=True, fastmath=True)
def crossentropy_softmax_backward_kernel4(dlogits, dlosses, probs, targets, V):
    x, p = cuda.local.array((PIECES, 4), float32), cuda.local.array((PIECES, 4), float32)
    row, step = cuda.blockIdx.x, 4 * cuda.blockDim.x
    v = PIECES * step * cuda.blockIdx.y + 4 * cuda.threadIdx.x
    i = row * dlogits.shape[1] + v
    scale, target = dlosses[row], targets[row]
    for k in range(PIECES):
        if v + k * step + 3 < V:
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(dlogits, i + k * step)
            p[k, 0], p[k, 1], p[k, 2], p[k, 3] = load4(probs, i + k * step)
    for k in range(PIECES):
        if v + k * step + 3 < V:
            for j in range(4):
                x[k, j] += (p[k, j] - float32(1 if v + k * step + j == target else 0)) * scale
            store4(dlogits, i + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
    add_ragged(dlogits, dlosses, probs, targets, row, V)


@crossentropy_softmax_backward.version(4, "four pieces a thread, eight independent loads in flight")
def crossentropy_softmax_backward4(dlogits, dlosses, probs, targets, V, *, block_size=256, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 2."""
    if dlogits.shape[1] % 4:
        crossentropy_softmax_backward2(dlogits, dlosses, probs, targets, V, block_size=block_size, stream=stream)
        return
    grid = dlosses.size, ceil_div(V, 4 * PIECES * block_size)
    crossentropy_softmax_backward_kernel4[grid, block_size, stream](dlogits, dlosses, probs, targets, V)


@cuda.jit(cache=True, fastmath=True)
def crossentropy_softmax_backward_kernel5(dlogits, dlosses, probs, targets, V):
    x, p = cuda.local.array((PIECES, 4), float32), cuda.local.array((PIECES, 4), float32)
    row, step = cuda.blockIdx.x, 4 * cuda.blockDim.x
    v = PIECES * step * cuda.blockIdx.y + 4 * cuda.threadIdx.x
    i = row * dlogits.shape[1] + v
    scale, target = dlosses[row], targets[row]
    for k in range(PIECES):
        if v + k * step + 3 < V:
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(dlogits, i + k * step)
            p[k, 0], p[k, 1], p[k, 2], p[k, 3] = load4(probs, i + k * step)
    for k in range(PIECES):
        if v + k * step + 3 < V:
            for j in range(4):
                x[k, j] += p[k, j] * scale
            store4(dlogits, i + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
            if target >> 2 == (v + k * step) >> 2:  # once a row, by the thread that has just stored the piece
                dlogits[row, target] -= scale
    add_ragged(dlogits, dlosses, probs, targets, row, V)


@crossentropy_softmax_backward.version(5, "the target's column apart")
def crossentropy_softmax_backward5(dlogits, dlosses, probs, targets, V, *, block_size=256, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 2."""
    if dlogits.shape[1] % 4:
        crossentropy_softmax_backward2(dlogits, dlosses, probs, targets, V, block_size=block_size, stream=stream)
        return
    grid = dlosses.size, ceil_div(V, 4 * PIECES * block_size)
    crossentropy_softmax_backward_kernel5[grid, block_size, stream](dlogits, dlosses, probs, targets, V)
