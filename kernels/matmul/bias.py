"""The bias gradient of a matmul: dbias += the column sums of dout.

The story is told in doc/bias.md.

version 1: a thread a column
version 2: a block a column: all rows at once, but neighbouring threads read far apart
version 3: a warp reads 32 neighbouring columns of a row; the block's warps take different rows, shared memory adds them up
version 4: rows are split among blocks too, so that all multiprocessors read; blocks add up by atomics
version 5: blocks leave their sums in memory, a second kernel adds them in a fixed order: the same bits every run
version 6: 16-byte loads, eight in flight a thread
version 7: one kernel: the block that finishes a strip of columns last adds up what the others left
version 8: strips so narrow that a block can have one to itself, all rows: nothing is left to add up
"""

import functools

import numpy as np

import cpu_reference
from kernels.device import (
    FULL_MASK,
    WARP,
    ceil_div,
    cuda,
    float32,
    int32,
    load4_streaming,
    multiprocessors,
    scratch,
    store4,
)
from kernels.op import Op
from kernels.reduce import block_sum, whole_warps

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
    odd=[{"N": N, "OC": OC} for N, OC in ((1, 132), (7, 1), (7, 3), (33, 33), (5, 161), (100, 64), (1100, 4))],
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
    """dbias: float32 (OC,), added to; dout: float32 (N, OC). So in every version."""
    blocks = ceil_div(dbias.size, block_size)
    matmul_backward_bias_kernel1[blocks, block_size, stream](dbias, dout)


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_bias_kernel2(dbias, dout):
    column = cuda.blockIdx.x
    total = float32(0)
    for row in range(cuda.threadIdx.x, dout.shape[0], cuda.blockDim.x):
        total += dout[row, column]
    total = block_sum(total)
    if cuda.threadIdx.x == 0:
        dbias[column] += total


@matmul_backward_bias.version(2, "a block a column")
def matmul_backward_bias2(dbias, dout, *, block_size=256, stream=0):
    whole_warps(block_size)
    matmul_backward_bias_kernel2[dbias.size, block_size, stream](dbias, dout)


@cuda.jit(device=True, cache=True, fastmath=True)
def strip_sum(dout, column, first, end):
    """The sum of a column over rows first to end - 1, for the 32 columns of a block; warp 0 gets it."""
    sums = cuda.shared.array((WARP, WARP), float32)
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    total = float32(0)
    if column < dout.shape[1]:
        for row in range(first + warp, end, warps):
            total += dout[row, column]
    sums[warp, lane] = total
    cuda.syncthreads()
    if warp == 0:
        for other in range(1, warps):
            total += sums[other, lane]
    return total


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_bias_kernel3(dbias, dout):
    column = cuda.blockIdx.x * WARP + (cuda.threadIdx.x & 31)
    total = strip_sum(dout, column, 0, dout.shape[0])
    if cuda.threadIdx.x < WARP and column < dbias.size:
        dbias[column] += total


@matmul_backward_bias.version(3, "a warp reads 32 neighbouring columns, shared memory adds up the warps")
def matmul_backward_bias3(dbias, dout, *, block_size=1024, stream=0):
    whole_warps(block_size)
    matmul_backward_bias_kernel3[ceil_div(dbias.size, WARP), block_size, stream](dbias, dout)


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_bias_kernel4(dbias, dout, rows):
    column, first = cuda.blockIdx.x * WARP + (cuda.threadIdx.x & 31), cuda.blockIdx.y * rows
    total = strip_sum(dout, column, first, min(first + rows, dout.shape[0]))
    if cuda.threadIdx.x < WARP and column < dbias.size:
        cuda.atomic.add(dbias, column, total)


def rows_a_block(N: int, strips: int, round_: int, blocks: int) -> int:
    """How many of N rows a block takes, in whole rounds, so that with so many strips there are about `blocks` of them."""
    rounds = ceil_div(N, round_)
    return round_ * max(1, round(rounds * strips / blocks), ceil_div(rounds, 65535))


@matmul_backward_bias.version(4, "rows split among blocks, which add up by atomics, in any order", repeatable=False)
def matmul_backward_bias4(dbias, dout, *, block_size=256, stream=0):
    N, OC = dout.shape
    strips = ceil_div(OC, WARP)
    rows = rows_a_block(N, strips, 4 * whole_warps(block_size), 16 * multiprocessors())
    matmul_backward_bias_kernel4[(strips, ceil_div(N, rows)), block_size, stream](dbias, dout, rows)


@cuda.jit(cache=True, fastmath=True)
def matmul_backward_bias_kernel5(partials, dout, rows):
    column, first = cuda.blockIdx.x * WARP + (cuda.threadIdx.x & 31), cuda.blockIdx.y * rows
    total = strip_sum(dout, column, first, min(first + rows, dout.shape[0]))
    if cuda.threadIdx.x < WARP and column < dout.shape[1]:
        partials[cuda.blockIdx.y, column] = total


@matmul_backward_bias.version(5, "no atomics: a second kernel adds up the blocks in a fixed order")
def matmul_backward_bias5(dbias, dout, *, block_size=256, stream=0):
    N, OC = dout.shape
    strips = ceil_div(OC, WARP)
    rows = rows_a_block(N, strips, 4 * whole_warps(block_size), 16 * multiprocessors())
    chunks = ceil_div(N, rows)
    partials = scratch("matmul_backward_bias5", (chunks, OC))
    matmul_backward_bias_kernel5[(strips, chunks), block_size, stream](partials, dout, rows)
    matmul_backward_bias_kernel3[strips, block_size, stream](dbias, partials)


WARPS6 = 8  # a block's
STRIP6 = 4 * WARP  # columns, 512 bytes of a row: a warp reads them in one load
FLIGHT = 8  # rows, of which each thread has its 16 bytes on the way


@cuda.jit(device=True, cache=True, fastmath=True)
def rows_sum4(dout, i, rows, step):
    """The sums of four neighbouring columns, from element i on, over so many rows, whose elements are `step` apart. Where
    the compiler knows the step, eight loads need one address."""
    x = cuda.local.array((FLIGHT, 4), float32)
    a, b, c, d = float32(0), float32(0), float32(0), float32(0)
    while rows > 0:
        for k in range(FLIGHT):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = float32(0), float32(0), float32(0), float32(0)
            if k < rows:
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4_streaming(dout, i + k * step)
        for k in range(FLIGHT):
            a += x[k, 0]
            b += x[k, 1]
            c += x[k, 2]
            d += x[k, 3]
        rows -= FLIGHT
        i += FLIGHT * step
    return a, b, c, d


@cuda.jit(device=True, cache=True, fastmath=True)
def strip_sum4(dout, first, end, OC):
    """The sums of the block's 128 columns over rows first to end - 1: thread t gets the one of column t, t < 128."""
    sums = cuda.shared.array((WARPS6, STRIP6), float32, alignment=16)
    thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    column = cuda.blockIdx.x * STRIP6 + 4 * lane
    rows = (end - first - warp + WARPS6 - 1) // WARPS6 if column < OC else 0  # the warp's: every eighth
    a, b, c, d = rows_sum4(dout, (first + warp) * OC + column, rows, WARPS6 * OC)
    cuda.syncthreads()  # who still reads the sums of the call before
    store4(sums, warp * STRIP6 + 4 * lane, a, b, c, d)
    cuda.syncthreads()
    total = float32(0)
    if thread < STRIP6:
        for w in range(WARPS6):
            total += sums[w, thread]
    return total


@functools.cache
def make_matmul_backward_bias_kernels6(OC):
    """The kernels for rows of OC columns, a number that the compiler knows."""

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(WARP * WARPS6, 4))
    def matmul_backward_bias_kernel6(partials, dout, rows):
        column, first = cuda.blockIdx.x * STRIP6 + cuda.threadIdx.x, cuda.blockIdx.y * rows
        total = strip_sum4(dout, first, min(first + rows, dout.shape[0]), OC)
        if cuda.threadIdx.x < STRIP6 and column < OC:
            partials[cuda.blockIdx.y, column] = total

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(WARP * WARPS6, 4))
    def finish_kernel6(dbias, partials):
        column = cuda.blockIdx.x * STRIP6 + cuda.threadIdx.x
        total = strip_sum4(partials, 0, partials.shape[0], OC)
        if cuda.threadIdx.x < STRIP6 and column < OC:
            dbias[column] += total

    return matmul_backward_bias_kernel6, finish_kernel6


def split6(N: int, OC: int) -> tuple[int, int, int]:
    """Strips of columns, chunks of rows, and the rows of a chunk: some twelve blocks a multiprocessor."""
    strips = ceil_div(OC, STRIP6)
    rows = rows_a_block(N, strips, WARPS6 * FLIGHT, 12 * multiprocessors())
    return strips, ceil_div(N, rows), rows


@matmul_backward_bias.version(6, "16-byte loads, eight in flight a thread")
def matmul_backward_bias6(dbias, dout, *, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 5."""
    N, OC = dout.shape
    if OC % 4:
        matmul_backward_bias5(dbias, dout, stream=stream)
        return
    strips, chunks, rows = split6(N, OC)
    partials = scratch("matmul_backward_bias6", (chunks, OC))
    kernel, finish = make_matmul_backward_bias_kernels6(OC)
    kernel[(strips, chunks), WARP * WARPS6, stream](partials, dout, rows)
    finish[strips, WARP * WARPS6, stream](dbias, partials)


@functools.cache
def make_matmul_backward_bias_kernel7(OC):
    @cuda.jit(cache=True, fastmath=True, launch_bounds=(WARP * WARPS6, 4))
    def matmul_backward_bias_kernel7(dbias, partials, finished, dout, rows):
        thread, strip, chunk, chunks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.y
        column, first = strip * STRIP6 + thread, chunk * rows
        mine = thread < STRIP6 and column < OC
        total = strip_sum4(dout, first, min(first + rows, dout.shape[0]), OC)
        if mine:
            partials[chunk, column] = total
        cuda.syncthreads()
        last = int32(0)
        if thread == 0:
            cuda.threadfence()  # who sees the count that follows sees the block's sums
            last = int32(cuda.atomic.inc(finished, strip, chunks - 1) == chunks - 1)  # then it starts again at 0
            cuda.threadfence()  # and here sees the sums of all blocks before
        if cuda.syncthreads_or(last):
            total = strip_sum4(partials, 0, chunks, OC)
            if mine:
                dbias[column] += total

    return matmul_backward_bias_kernel7


@matmul_backward_bias.version(7, "one kernel: the last block of a strip adds up")
def matmul_backward_bias7(dbias, dout, *, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 5."""
    N, OC = dout.shape
    if OC % 4:
        matmul_backward_bias5(dbias, dout, stream=stream)
        return
    strips, chunks, rows = split6(N, OC)
    partials = scratch("matmul_backward_bias7", (chunks, OC))
    finished = scratch("matmul_backward_bias7 finished", strips, np.uint32, zeroed=True)  # and so the kernel leaves it
    kernel = make_matmul_backward_bias_kernel7(OC)
    kernel[(strips, chunks), WARP * WARPS6, stream](dbias, partials, finished, dout, rows)


WARPS8 = 16
LANES8 = 4  # side by side in a row: 64 bytes
STRIP8 = 4 * LANES8  # columns a block


@functools.cache
def make_matmul_backward_bias_kernel8(OC):
    step = WARP * WARPS8 // LANES8  # rows that the block reads side by side

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(WARP * WARPS8, 2))
    def matmul_backward_bias_kernel8(dbias, dout):
        sums = cuda.shared.array((WARPS8, STRIP8), float32, alignment=16)
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        first, column = thread // LANES8, cuda.blockIdx.x * STRIP8 + 4 * (thread % LANES8)
        rows = (dout.shape[0] - first + step - 1) // step if column < OC else 0
        a, b, c, d = rows_sum4(dout, first * OC + column, rows, step * OC)
        offset = WARP // 2
        while offset >= LANES8:  # the lanes of the same four columns
            a += cuda.shfl_xor_sync(FULL_MASK, a, offset)
            b += cuda.shfl_xor_sync(FULL_MASK, b, offset)
            c += cuda.shfl_xor_sync(FULL_MASK, c, offset)
            d += cuda.shfl_xor_sync(FULL_MASK, d, offset)
            offset //= 2
        if lane < LANES8:
            store4(sums, warp * STRIP8 + 4 * lane, a, b, c, d)
        cuda.syncthreads()
        column = cuda.blockIdx.x * STRIP8 + thread
        if thread < STRIP8 and column < OC:
            total = float32(0)
            for w in range(WARPS8):
                total += sums[w, thread]
            dbias[column] += total

    return matmul_backward_bias_kernel8


@matmul_backward_bias.version(8, "narrow strips: a block adds up 16 columns over all rows")
def matmul_backward_bias8(dbias, dout, *, stream=0):
    """Rows that are no multiple of 16 bytes go the way of version 5."""
    OC = dout.shape[1]
    if OC % 4:
        matmul_backward_bias5(dbias, dout, stream=stream)
        return
    kernel = make_matmul_backward_bias_kernel8(OC)
    kernel[ceil_div(OC, STRIP8), WARP * WARPS8, stream](dbias, dout)
