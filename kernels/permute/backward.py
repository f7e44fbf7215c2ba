"""Permute backward: dqkv (B,T,3C) out of dq, dk, dv (B,NH,T,hs). Unpermute backward: dinp (B,NH,T,hs) out of dout (B,T,C).

version 1: a thread an element, whose place it finds by dividing by hs, T and NH
version 2: a block a tile of 32 positions and 32 channels, through shared memory: a block knows its place
version 3: no shared memory, which nothing needs here; 16-byte loads and stores, three or four independent ones a thread
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32, load4_streaming, store4
from kernels.op import Op
from kernels.permute.forward import PERMUTE_SHAPES, permute_forward, unpermute_forward
from kernels.permute.tiles import ROUNDS, TILE, TILE_ROW, TILE_THREADS, shape_of_heads, threads_and_grid, tile_grid

permute_backward = Op(
    reference=cpu_reference.permute_backward,
    inputs=lambda rng, B, T, NH, hs: {
        name: rng.standard_normal((B, NH, T, hs), dtype=np.float32) for name in ("dq", "dk", "dv")
    },
    outputs=lambda B, T, NH, hs: {"dqkv": (B, T, 3 * NH * hs)},
    bytes_moved=permute_forward.bytes_moved,
    **PERMUTE_SHAPES,
)

unpermute_backward = Op(
    reference=cpu_reference.unpermute_backward,
    inputs=lambda rng, B, T, NH, hs: {"dout": rng.standard_normal((B, T, NH * hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: {"dinp": (B, NH, T, hs)},
    bytes_moved=unpermute_forward.bytes_moved,
    **PERMUTE_SHAPES,
)


@cuda.jit(cache=True)
def permute_backward_kernel1(dqkv, dq, dk, dv):
    B, NH, T, hs = dq.shape
    i = cuda.grid(1)
    if i < dq.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        dqkv[b, t, h * hs + d] = dq[b, h, t, d]
        dqkv[b, t, (NH + h) * hs + d] = dk[b, h, t, d]
        dqkv[b, t, (2 * NH + h) * hs + d] = dv[b, h, t, d]


@permute_backward.version(1, "a thread an element")
def permute_backward1(dqkv, dq, dk, dv, *, block_size=256, stream=0):
    """dqkv: float32 (B, T, 3*NH*hs); dq, dk, dv: (B, NH, T, hs), on the device."""
    permute_backward_kernel1[ceil_div(dq.size, block_size), block_size, stream](dqkv, dq, dk, dv)


@cuda.jit(cache=True)
def permute_backward_kernel2(dqkv, dq, dk, dv):
    B, NH, T, hs = dq.shape
    tile = cuda.shared.array((3, TILE, TILE_ROW), float32)
    b, h = cuda.blockIdx.z // NH, cuda.blockIdx.z % NH
    x, d = cuda.threadIdx.x, cuda.blockIdx.y * TILE + cuda.threadIdx.x
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            tile[0, y, x] = dq[b, h, t, d]
            tile[1, y, x] = dk[b, h, t, d]
            tile[2, y, x] = dv[b, h, t, d]
    cuda.syncthreads()
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            for part in range(3):
                dqkv[b, t, (part * NH + h) * hs + d] = tile[part, y, x]


@permute_backward.version(2, "a block a tile, through shared memory")
def permute_backward2(dqkv, dq, dk, dv, *, stream=0):
    """dqkv: float32 (B, T, 3*NH*hs); dq, dk, dv: (B, NH, T, hs), on the device."""
    permute_backward_kernel2[tile_grid(*shape_of_heads(dq)), TILE_THREADS, stream](dqkv, dq, dk, dv)


@cuda.jit(cache=True)
def permute_backward_kernel3(dqkv, dq, dk, dv):
    B, NH, T, hs = dq.shape
    t, h, b = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.blockIdx.y, cuda.blockIdx.z
    if t < T:
        C = NH * hs
        wide = (b * T + t) * 3 * C + h * hs + 4 * cuda.threadIdx.x  # in dqkv
        narrow = ((b * NH + h) * T + t) * hs + 4 * cuda.threadIdx.x  # in dq, dk and dv
        q4 = load4_streaming(dq, narrow)
        k4 = load4_streaming(dk, narrow)
        v4 = load4_streaming(dv, narrow)
        store4(dqkv, wide, *q4)
        store4(dqkv, wide + C, *k4)
        store4(dqkv, wide + 2 * C, *v4)


@permute_backward.version(3, "16-byte loads and stores, no shared memory")
def permute_backward3(dqkv, dq, dk, dv, *, block_size=256, stream=0):
    """As version 2, with hs a multiple of 4."""
    grid, threads = threads_and_grid(*shape_of_heads(dq), block_size, rounds=1)
    permute_backward_kernel3[grid, threads, stream](dqkv, dq, dk, dv)


@cuda.jit(cache=True)
def unpermute_backward_kernel1(dinp, dout):
    B, NH, T, hs = dinp.shape
    i = cuda.grid(1)
    if i < dinp.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        dinp[b, h, t, d] = dout[b, t, h * hs + d]


@unpermute_backward.version(1, "a thread an element")
def unpermute_backward1(dinp, dout, *, block_size=256, stream=0):
    """dinp: float32 (B, NH, T, hs); dout: (B, T, NH*hs), on the device."""
    unpermute_backward_kernel1[ceil_div(dinp.size, block_size), block_size, stream](dinp, dout)


@cuda.jit(cache=True)
def unpermute_backward_kernel2(dinp, dout):
    B, NH, T, hs = dinp.shape
    tile = cuda.shared.array((TILE, TILE_ROW), float32)
    b, h = cuda.blockIdx.z // NH, cuda.blockIdx.z % NH
    x, d = cuda.threadIdx.x, cuda.blockIdx.y * TILE + cuda.threadIdx.x
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            tile[y, x] = dout[b, t, h * hs + d]
    cuda.syncthreads()
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            dinp[b, h, t, d] = tile[y, x]


@unpermute_backward.version(2, "a block a tile, through shared memory")
def unpermute_backward2(dinp, dout, *, stream=0):
    """dinp: float32 (B, NH, T, hs); dout: (B, T, NH*hs), on the device."""
    unpermute_backward_kernel2[tile_grid(*shape_of_heads(dinp)), TILE_THREADS, stream](dinp, dout)


@cuda.jit(cache=True)
def unpermute_backward_kernel3(dinp, dout):
    B, NH, T, hs = dinp.shape
    h, b = cuda.blockIdx.y, cuda.blockIdx.z
    first, step = cuda.blockIdx.x * ROUNDS * cuda.blockDim.y + cuda.threadIdx.y, cuda.blockDim.y
    wide = b * T * NH * hs + h * hs + 4 * cuda.threadIdx.x  # in dout, at position 0
    narrow = (b * NH + h) * T * hs + 4 * cuda.threadIdx.x  # in dinp
    x = cuda.local.array((ROUNDS, 4), float32)
    for r in range(ROUNDS):
        t = first + r * step
        if t < T:
            x[r, 0], x[r, 1], x[r, 2], x[r, 3] = load4_streaming(dout, wide + t * NH * hs)
    for r in range(ROUNDS):
        t = first + r * step
        if t < T:
            store4(dinp, narrow + t * hs, x[r, 0], x[r, 1], x[r, 2], x[r, 3])


@unpermute_backward.version(3, "16-byte loads and stores, no shared memory")
def unpermute_backward3(dinp, dout, *, block_size=256, stream=0):
    """As version 2, with hs a multiple of 4."""
    grid, threads = threads_and_grid(*shape_of_heads(dinp), block_size, ROUNDS)
    unpermute_backward_kernel3[grid, threads, stream](dinp, dout)
