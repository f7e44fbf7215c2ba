"""Permute forward: q, k, v (B,NH,T,hs) out of qkv (B,T,3C). Unpermute forward: the heads (B,NH,T,hs) back to (B,T,C).

version 1: a thread an element, whose place it finds by dividing by hs, T and NH
version 2: a block a tile of 32 positions and 32 channels, through shared memory: a block knows its place
version 3: no shared memory, which nothing needs here; 16-byte loads and stores, three or four independent ones a thread

In all of these arrays the hs channels of a head stand together. So reads and writes are coalesced as they are, and the
detour through shared memory that a transposed matrix needs is none that these ops need.
"""

import numpy as np

import cpu_reference
from kernels.device import ceil_div, cuda, float32, load4_streaming, store4
from kernels.op import Op
from kernels.permute.tiles import ROUNDS, TILE, TILE_ROW, TILE_THREADS, shape_of_heads, threads_and_grid, tile_grid

PERMUTE_SHAPES = {
    "shape": {"B": 8, "T": 1024, "NH": 12, "hs": 64},
    "small": {"B": 2, "T": 9, "NH": 3, "hs": 8},
    "odd": [{"B": 2, "T": 37, "NH": 2, "hs": hs} for hs in (1, 3, 33, 64, 100)]
    + [{"B": 1, "T": 1, "NH": 25, "hs": 64}],
    "trainer_shapes": [{"B": 4, "T": 1024, "NH": 12, "hs": 64}],
}

permute_forward = Op(
    reference=cpu_reference.permute_forward,
    inputs=lambda rng, B, T, NH, hs: {"qkv": rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: dict.fromkeys("qkv", (B, NH, T, hs)),
    bytes_moved=lambda B, T, NH, hs: 2 * 4 * B * T * 3 * NH * hs,
    **PERMUTE_SHAPES,
)

unpermute_forward = Op(
    reference=cpu_reference.unpermute_forward,
    inputs=lambda rng, B, T, NH, hs: {"inp": rng.standard_normal((B, NH, T, hs), dtype=np.float32)},
    outputs=lambda B, T, NH, hs: {"out": (B, T, NH * hs)},
    bytes_moved=lambda B, T, NH, hs: 2 * 4 * B * T * NH * hs,
    **PERMUTE_SHAPES,
)


@cuda.jit(cache=True)
def permute_forward_kernel1(q, k, v, qkv):
    B, NH, T, hs = q.shape
    i = cuda.grid(1)
    if i < q.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        q[b, h, t, d] = qkv[b, t, h * hs + d]
        k[b, h, t, d] = qkv[b, t, (NH + h) * hs + d]
        v[b, h, t, d] = qkv[b, t, (2 * NH + h) * hs + d]


@permute_forward.version(1, "a thread an element")
def permute_forward1(q, k, v, qkv, *, block_size=256, stream=0):
    """q, k, v: float32 (B, NH, T, hs); qkv: (B, T, 3*NH*hs), on the device."""
    permute_forward_kernel1[ceil_div(q.size, block_size), block_size, stream](q, k, v, qkv)


@cuda.jit(cache=True)
def permute_forward_kernel2(q, k, v, qkv):
    B, NH, T, hs = q.shape
    tile = cuda.shared.array((3, TILE, TILE_ROW), float32)
    b, h = cuda.blockIdx.z // NH, cuda.blockIdx.z % NH
    x, d = cuda.threadIdx.x, cuda.blockIdx.y * TILE + cuda.threadIdx.x
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            for part in range(3):
                tile[part, y, x] = qkv[b, t, (part * NH + h) * hs + d]
    cuda.syncthreads()
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            q[b, h, t, d] = tile[0, y, x]
            k[b, h, t, d] = tile[1, y, x]
            v[b, h, t, d] = tile[2, y, x]


@permute_forward.version(2, "a block a tile, through shared memory")
def permute_forward2(q, k, v, qkv, *, stream=0):
    """q, k, v: float32 (B, NH, T, hs); qkv: (B, T, 3*NH*hs), on the device."""
    permute_forward_kernel2[tile_grid(*shape_of_heads(q)), TILE_THREADS, stream](q, k, v, qkv)


@cuda.jit(cache=True)
def permute_forward_kernel3(q, k, v, qkv):
    B, NH, T, hs = q.shape
    t, h, b = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y, cuda.blockIdx.y, cuda.blockIdx.z
    if t < T:
        C = NH * hs
        wide = (b * T + t) * 3 * C + h * hs + 4 * cuda.threadIdx.x  # in qkv
        narrow = ((b * NH + h) * T + t) * hs + 4 * cuda.threadIdx.x  # in q, k and v
        q4 = load4_streaming(qkv, wide)
        k4 = load4_streaming(qkv, wide + C)
        v4 = load4_streaming(qkv, wide + 2 * C)
        store4(q, narrow, *q4)
        store4(k, narrow, *k4)
        store4(v, narrow, *v4)


@permute_forward.version(3, "16-byte loads and stores, no shared memory")
def permute_forward3(q, k, v, qkv, *, block_size=256, stream=0):
    """As version 2, with hs a multiple of 4."""
    grid, threads = threads_and_grid(*shape_of_heads(q), block_size, rounds=1)
    permute_forward_kernel3[grid, threads, stream](q, k, v, qkv)


@cuda.jit(cache=True)
def unpermute_forward_kernel1(out, inp):
    B, NH, T, hs = inp.shape
    i = cuda.grid(1)
    if i < inp.size:
        d, t, h, b = i % hs, i // hs % T, i // (hs * T) % NH, i // (hs * T * NH)
        out[b, t, h * hs + d] = inp[b, h, t, d]


@unpermute_forward.version(1, "a thread an element")
def unpermute_forward1(out, inp, *, block_size=256, stream=0):
    """out: float32 (B, T, NH*hs); inp: (B, NH, T, hs), on the device."""
    unpermute_forward_kernel1[ceil_div(inp.size, block_size), block_size, stream](out, inp)


@cuda.jit(cache=True)
def unpermute_forward_kernel2(out, inp):
    B, NH, T, hs = inp.shape
    tile = cuda.shared.array((TILE, TILE_ROW), float32)
    b, h = cuda.blockIdx.z // NH, cuda.blockIdx.z % NH
    x, d = cuda.threadIdx.x, cuda.blockIdx.y * TILE + cuda.threadIdx.x
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            tile[y, x] = inp[b, h, t, d]
    cuda.syncthreads()
    for y in range(cuda.threadIdx.y, TILE, 8):
        t = cuda.blockIdx.x * TILE + y
        if t < T and d < hs:
            out[b, t, h * hs + d] = tile[y, x]


@unpermute_forward.version(2, "a block a tile, through shared memory")
def unpermute_forward2(out, inp, *, stream=0):
    """out: float32 (B, T, NH*hs); inp: (B, NH, T, hs), on the device."""
    unpermute_forward_kernel2[tile_grid(*shape_of_heads(inp)), TILE_THREADS, stream](out, inp)


@cuda.jit(cache=True)
def unpermute_forward_kernel3(out, inp):
    B, NH, T, hs = inp.shape
    h, b = cuda.blockIdx.y, cuda.blockIdx.z
    first, step = cuda.blockIdx.x * ROUNDS * cuda.blockDim.y + cuda.threadIdx.y, cuda.blockDim.y
    wide = b * T * NH * hs + h * hs + 4 * cuda.threadIdx.x  # in out, at position 0
    narrow = (b * NH + h) * T * hs + 4 * cuda.threadIdx.x  # in inp
    x = cuda.local.array((ROUNDS, 4), float32)
    for r in range(ROUNDS):
        t = first + r * step
        if t < T:
            x[r, 0], x[r, 1], x[r, 2], x[r, 3] = load4_streaming(inp, narrow + t * hs)
    for r in range(ROUNDS):
        t = first + r * step
        if t < T:
            store4(out, wide + t * NH * hs, x[r, 0], x[r, 1], x[r, 2], x[r, 3])


@unpermute_forward.version(3, "16-byte loads and stores, no shared memory")
def unpermute_forward3(out, inp, *, block_size=256, stream=0):
    """As version 2, with hs a multiple of 4."""
    grid, threads = threads_and_grid(*shape_of_heads(inp), block_size, ROUNDS)
    unpermute_forward_kernel3[grid, threads, stream](out, inp)
