"""The square of the global norm of the gradient, for clipping: out = sum of inp^2.

version 1: one block, and a tree of additions in shared memory
version 2: the whole card: every warp adds its sum to the result atomically
version 3: 16-byte loads, and an atomic addition a block
version 4: four independent 16-byte loads in flight a thread
version 5: no atomics: blocks write the sums of fixed tiles, a second kernel adds these in order: the same bits every time
"""

import numpy as np

import cpu_reference
from kernels.device import (
    WARP,
    ceil_div,
    cuda,
    float32,
    float64,
    load4,
    multiprocessors,
    need,
    scratch,
)  # fmt: skip
from kernels.op import Op
from kernels.reduce import block_sum, warp_sum, whole_warps

global_norm_squared = Op(
    reference=cpu_reference.global_norm_squared,
    inputs=lambda rng, N: {"inp": rng.standard_normal(N, dtype=np.float32)},
    outputs=lambda N: {"out": 1},
    bytes_moved=lambda N: 4 * N,
    shape={"N": 124_475_904},
    small={"N": 1000},
    odd=[{"N": N} for N in (1, 3, 4, 129, 1027, 70_001)],
)


@cuda.jit(cache=True, fastmath=True)
def global_norm_squared_kernel1(out, inp):
    shared = cuda.shared.array(1024, float64)
    tid = cuda.threadIdx.x
    total = float64(0)  # in float32 the sum of 100,000 squares that one thread takes would be wrong in its fifth digit
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
    """out: float32 (1,); inp: float32 (N,), on the device."""
    need(block_size & (block_size - 1) == 0, f"needs a block size that is a power of two, got {block_size}")
    global_norm_squared_kernel1[1, block_size, stream](out, inp)


@cuda.jit(cache=True)
def zero_kernel(out):
    out[0] = float32(0)


def resident_blocks(elements, block_size):
    """As many blocks as the card holds at once, or fewer for fewer elements."""
    return min(multiprocessors() * (2048 // block_size), ceil_div(elements, block_size))


@cuda.jit(cache=True, fastmath=True)
def global_norm_squared_kernel2(out, inp):
    total = float32(0)
    for i in range(cuda.grid(1), inp.size, cuda.gridsize(1)):
        total += inp[i] * inp[i]
    total = warp_sum(total)
    if cuda.threadIdx.x % WARP == 0:
        cuda.atomic.add(out, 0, total)


@global_norm_squared.version(2, "the whole card, an atomic a warp (order decides the last bits)", repeatable=False)
def global_norm_squared2(out, inp, *, block_size=512, stream=0):
    """out: float32 (1,); inp: float32 (N,), on the device."""
    whole_warps(block_size)
    zero_kernel[1, 1, stream](out)
    global_norm_squared_kernel2[resident_blocks(inp.size, block_size), block_size, stream](out, inp)


@cuda.jit(device=True, cache=True, fastmath=True)
def square4(x):
    return x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]


@cuda.jit(cache=True, fastmath=True)
def global_norm_squared_kernel3(out, inp):
    total = float32(0)
    whole = inp.size // 4 * 4
    for i in range(4 * cuda.grid(1), whole, 4 * cuda.gridsize(1)):
        total += square4(load4(inp, i))
    i = whole + cuda.grid(1)
    if i < inp.size:  # the last one to three
        total += inp[i] * inp[i]
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(out, 0, total)


@global_norm_squared.version(3, "16-byte loads, an atomic a block (order decides the last bits)", repeatable=False)
def global_norm_squared3(out, inp, *, block_size=512, stream=0):
    """out: float32 (1,); inp: float32 (N,), 16-byte aligned, on the device."""
    whole_warps(block_size)
    zero_kernel[1, 1, stream](out)
    global_norm_squared_kernel3[resident_blocks(ceil_div(inp.size, 4), block_size), block_size, stream](out, inp)


@cuda.jit(device=True, cache=True, fastmath=True)
def sum_of_squares(inp, i, step, advance, stop):
    """A thread's part of the sum over inp[:stop]: four elements at i, i + step, i + 2 step and i + 3 step, which are four
    independent 16-byte loads, then those `advance` further on, and so on."""
    total0, total1, total2, total3 = float32(0), float32(0), float32(0), float32(0)
    while i + 3 * step + 3 < stop:
        x0 = load4(inp, i)
        x1 = load4(inp, i + step)
        x2 = load4(inp, i + 2 * step)
        x3 = load4(inp, i + 3 * step)
        total0 += square4(x0)
        total1 += square4(x1)
        total2 += square4(x2)
        total3 += square4(x3)
        i += advance
    while i < stop:
        for j in range(i, min(i + 4, stop)):
            total0 += inp[j] * inp[j]
        i += step
    return (total0 + total1) + (total2 + total3)


@cuda.jit(cache=True, fastmath=True)
def global_norm_squared_kernel4(out, inp, tile):
    start = cuda.blockIdx.x * tile
    stop = min(start + tile, inp.size)
    step = 4 * cuda.blockDim.x
    total = block_sum(sum_of_squares(inp, start + 4 * cuda.threadIdx.x, step, 4 * step, stop))
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(out, 0, total)


# Elements a block: several blocks for each place on the card, so that none is left without work for long.
TILE = 1 << 15


@global_norm_squared.version(
    4, "four loads in flight, an atomic a block (order decides the last bits)", repeatable=False
)
def global_norm_squared4(out, inp, *, block_size=512, stream=0):
    """out: float32 (1,); inp: float32 (N,), 16-byte aligned, on the device."""
    whole_warps(block_size)
    zero_kernel[1, 1, stream](out)
    global_norm_squared_kernel4[ceil_div(inp.size, TILE), block_size, stream](out, inp, TILE)


@cuda.jit(cache=True, fastmath=True)
def tile_sums_kernel(sums, inp, tile):
    start = cuda.blockIdx.x * tile
    stop = min(start + tile, inp.size)
    step = 4 * cuda.blockDim.x
    total = block_sum(sum_of_squares(inp, start + 4 * cuda.threadIdx.x, step, 4 * step, stop))
    if cuda.threadIdx.x == 0:
        sums[cuda.blockIdx.x] = total


@cuda.jit(cache=True, fastmath=True)
def sum_in_order_kernel(out, sums):
    total = float64(0)
    for i in range(cuda.threadIdx.x, sums.size, cuda.blockDim.x):
        total += sums[i]
    total = block_sum(float32(total))
    if cuda.threadIdx.x == 0:
        out[0] = total


@global_norm_squared.version(5, "sums of fixed tiles, which a second kernel adds in order: repeatable")
def global_norm_squared5(out, inp, *, block_size=512, stream=0):
    """out: float32 (1,); inp: float32 (N,), 16-byte aligned, on the device."""
    whole_warps(block_size)
    sums = scratch("global_norm_squared5", ceil_div(inp.size, TILE))
    tile_sums_kernel[sums.size, block_size, stream](sums, inp, TILE)
    sum_in_order_kernel[1, 1024, stream](out, sums)
