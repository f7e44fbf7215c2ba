"""Softmax forward: out = exp(inp - max) / sum of exp(inp - max), over the C columns of each row.

The story is told in doc/softmax.md.

version 1: a thread a row, which it reads three times: maximum, sum, result
version 2: a block a row: neighbouring threads read neighbouring columns; maximum and sum by a tree in shared memory
version 3: a warp a row: lanes talk by shuffles, no barrier
version 4: warp and block: shuffles inside the warps, shared memory between them: for few or long rows
version 5: online, a thread a row: maximum and sum in one pass, the row is read twice
version 6: online, a block a row
version 7: for wide rows: 16-byte loads and stores, though rows start anywhere; four in flight; read again backwards, from L2
version 8: the row stays in registers and is read once; blocks stay too, and load the next row while they write this one
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.device import (
    WARP,
    ceil_div,
    cuda,
    exp2_approx,
    float32,
    float64,
    load4,
    multiprocessors,
    need,
    store4,
)
from kernels.op import Op
from kernels.reduce import (
    LOG2E,
    LOWEST,
    block_max,
    block_online,
    block_sum,
    online_add,
    online_add4,
    power,
    tree_sum,
    warp_max,
    warp_sum,
    whole_warps,
)

softmax_forward = Op(
    reference=cpu_reference.softmax_forward,
    inputs=lambda rng, N, C: {"inp": 3 * rng.standard_normal((N, C), dtype=np.float32)},
    outputs=lambda N, C: {"out": (N, C)},
    bytes_moved=lambda N, C: 2 * 4 * N * C,
    shape={"N": 8192, "C": 50257},
    small={"N": 3, "C": 100},
    odd=[{"N": N, "C": C} for N, C in ((3, 1), (5, 3), (2, 4), (5, 33), (2, 768), (5, 1601), (5, 4099), (1, 4999))],
)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel1(out, inp):
    row = cuda.grid(1)
    N, C = inp.shape
    if row < N:
        largest = LOWEST
        for c in range(C):
            largest = max(largest, inp[row, c])
        total = float64(0)  # in float32, so many additions one after the other lose what is small
        for c in range(C):
            total += math.exp(inp[row, c] - largest)
        norm = float32(1 / total)
        for c in range(C):
            out[row, c] = math.exp(inp[row, c] - largest) * norm


@softmax_forward.version(1, "a thread a row")
def softmax_forward1(out, inp, *, block_size=128, stream=0):
    """out, inp: float32 (N, C)."""
    softmax_forward_kernel1[ceil_div(inp.shape[0], block_size), block_size, stream](out, inp)


@cuda.jit(device=True, cache=True)
def tree_max(shared, x):
    """The maximum of x over the block's threads, a power of two: half of them look at the other half's, again and again."""
    thread, half = cuda.threadIdx.x, cuda.blockDim.x // 2
    shared[thread] = x
    cuda.syncthreads()
    while half > 0:
        if thread < half:
            shared[thread] = max(shared[thread], shared[thread + half])
        cuda.syncthreads()
        half //= 2
    return shared[0]


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel2(out, inp):
    shared = cuda.shared.array(0, float32)
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    C = inp.shape[1]
    largest = LOWEST
    for c in range(thread, C, threads):
        largest = max(largest, inp[row, c])
    largest = tree_max(shared, largest)
    total = float32(0)
    for c in range(thread, C, threads):
        total += math.exp(inp[row, c] - largest)
    cuda.syncthreads()  # who still reads shared[0], the maximum
    total = tree_sum(shared, total)
    for c in range(thread, C, threads):
        out[row, c] = math.exp(inp[row, c] - largest) / total


@softmax_forward.version(2, "a block a row, maximum and sum by a tree in shared memory")
def softmax_forward2(out, inp, *, block_size=256, stream=0):
    need(block_size & (block_size - 1) == 0, f"needs a block size that is a power of two, got {block_size}")
    softmax_forward_kernel2[inp.shape[0], block_size, stream, 4 * block_size](out, inp)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel3(out, inp):
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) // WARP
    N, C = inp.shape
    if row < N:  # for a whole warp or for none of it, as shuffles need
        largest = LOWEST
        for c in range(lane, C, WARP):
            largest = max(largest, inp[row, c])
        largest = warp_max(largest)
        total = float32(0)
        for c in range(lane, C, WARP):
            total += math.exp(inp[row, c] - largest)
        total = warp_sum(total)
        for c in range(lane, C, WARP):
            out[row, c] = math.exp(inp[row, c] - largest) / total


@softmax_forward.version(3, "a warp a row, maximum and sum by shuffles")
def softmax_forward3(out, inp, *, block_size=256, stream=0):
    blocks = ceil_div(inp.shape[0], whole_warps(block_size))
    softmax_forward_kernel3[blocks, block_size, stream](out, inp)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel4(out, inp):
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    C = inp.shape[1]
    largest = LOWEST
    for c in range(thread, C, threads):
        largest = max(largest, inp[row, c])
    largest = block_max(largest)
    total = float32(0)
    for c in range(thread, C, threads):
        total += math.exp(inp[row, c] - largest)
    total = block_sum(total)
    for c in range(thread, C, threads):
        out[row, c] = math.exp(inp[row, c] - largest) / total


@softmax_forward.version(4, "a block a row, shuffles inside the warps, shared memory between them")
def softmax_forward4(out, inp, *, block_size=512, stream=0):
    whole_warps(block_size)
    softmax_forward_kernel4[inp.shape[0], block_size, stream](out, inp)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel5(out, inp):
    row = cuda.grid(1)
    N, C = inp.shape
    if row < N:
        top, total = LOWEST, float64(0)
        for c in range(C):
            top, total = online_add(top, total, inp[row, c])
        norm = float32(1 / total)
        for c in range(C):
            out[row, c] = power(inp[row, c], top) * norm


@softmax_forward.version(5, "online: maximum and sum in one pass, a thread a row")
def softmax_forward5(out, inp, *, block_size=128, stream=0):
    softmax_forward_kernel5[ceil_div(inp.shape[0], block_size), block_size, stream](out, inp)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel6(out, inp):
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    C = inp.shape[1]
    top, total = LOWEST, float32(0)
    for c in range(thread, C, threads):
        top, total = online_add(top, total, inp[row, c])
    top, total = block_online(top, total)
    norm = float32(1) / total
    for c in range(thread, C, threads):
        out[row, c] = power(inp[row, c], top) * norm


@softmax_forward.version(6, "online, a block a row")
def softmax_forward6(out, inp, *, block_size=512, stream=0):
    whole_warps(block_size)
    softmax_forward_kernel6[inp.shape[0], block_size, stream](out, inp)


# From here on a row is 16-byte pieces between two ragged edges. Row r starts at element r * C, which need not be a multiple
# of 4: up to three columns at the head come before the first piece, and up to three at the tail come after the last. Each
# of these six has a thread: its number is the column at the head, and falls short of the one at the tail by 4 * pieces.


@cuda.jit(device=True, cache=True)
def ragged(start, C, thread):
    """Of the row of C columns that starts at element `start`: the columns at its head, its pieces, and the column at an edge
    that is this thread's: C or more if none is."""
    head = -start & 3
    pieces = max((C - head) // 4, 0)
    return head, pieces, thread if thread < head else thread + 4 * pieces


@cuda.jit(device=True, cache=True, fastmath=True)
def store_probabilities(out, i, a, b, c, d, top, norm):
    a, b = power(a, top) * norm, power(b, top) * norm
    c, d = power(c, top) * norm, power(d, top) * norm
    store4(out, i, a, b, c, d)


@cuda.jit(cache=True, fastmath=True)
def softmax_forward_kernel7(out, inp):
    row, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    C = inp.shape[1]
    head, pieces, edge = ragged(row * C, C, thread)
    base, step = row * C + head, 4 * threads
    first, end, rounds = 4 * thread, 4 * pieces, pieces // (4 * threads) * 4 * step  # where rounds of four pieces end
    x = cuda.local.array((4, 4), float32)
    edge_x = inp[row, edge] if edge < C else LOWEST
    top, total = LOWEST, float32(0)
    if edge < C:
        top, total = online_add(top, total, edge_x)
    c = first
    while c < rounds:
        for k in range(4):  # all four loads are under way before the first is needed
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(inp, base + c + k * step)
        for k in range(4):
            top, total = online_add4(top, total, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
        c += 4 * step
    while c < end:
        x[0, 0], x[0, 1], x[0, 2], x[0, 3] = load4(inp, base + c)
        top, total = online_add4(top, total, x[0, 0], x[0, 1], x[0, 2], x[0, 3])
        c += step
    top, total = block_online(top, total)
    norm = float32(1) / total
    if edge < C:
        out[row, edge] = power(edge_x, top) * norm
    c = rounds + first
    while c < end:
        x[0, 0], x[0, 1], x[0, 2], x[0, 3] = load4(inp, base + c)
        store_probabilities(out, base + c, x[0, 0], x[0, 1], x[0, 2], x[0, 3], top, norm)
        c += step
    c = rounds + first - 4 * step
    while c >= 0:
        for k in range(4):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(inp, base + c + k * step)
        for k in range(4):
            store_probabilities(out, base + c + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3], top, norm)
        c -= 4 * step


@softmax_forward.version(7, "wide rows: 16-byte loads, four in flight; read again backwards, from L2")
def softmax_forward7(out, inp, *, block_size=1024, stream=0):
    whole_warps(block_size)
    softmax_forward_kernel7[inp.shape[0], block_size, stream](out, inp)


THREADS8 = 512  # so that each has 128 registers: 100 of them hold its part of a row of 50257
PIECES8 = 25  # of 16 bytes, that fit there


@functools.cache
def make_softmax_forward_kernel8(C):
    """The kernel for rows of C columns. The compiler knows C: it unrolls the loops, and x becomes registers.

    The powers of 2 of a group of pieces refer to the group's top, so that the first are computed while the last pieces
    are on their way. All pieces but the last are there for every thread and row.
    """
    step = 4 * THREADS8
    pieces = ceil_div(C // 4, THREADS8)
    last = pieces - 1
    group = next((size for size in (5, 4, 6, 3) if pieces % size == 0), pieces)
    groups = pieces // group

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS8, 1))
    def softmax_forward_kernel8(out, inp):
        x = cuda.local.array((pieces, 4), float32)
        tops = cuda.local.array(groups, float32)
        thread = cuda.threadIdx.x
        N = inp.shape[0]
        row, rows = cuda.blockIdx.x, cuda.gridDim.x
        head, whole, edge = ragged(row * C, C, thread)
        first = row * C + head + 4 * thread
        for k in range(last):
            x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(inp, first + k * step)
        x[last, 0], x[last, 1], x[last, 2], x[last, 3] = load_last8(
            inp, first + last * step, thread + last * THREADS8 < whole
        )
        edge_x = inp[row, edge] if edge < C else LOWEST
        while row < N:
            top, total = LOWEST, float32(0)
            if edge < C:
                top, total = online_add(top, total, edge_x)
            for g in range(groups):
                largest = LOWEST
                for k in range(g * group, g * group + group):
                    largest = max(largest, max(max(x[k, 0], x[k, 1]), max(x[k, 2], x[k, 3])))
                tops[g] = max(LOWEST, LOG2E * largest)  # with no column here, all powers are 0
                powers = float32(0)
                for k in range(g * group, g * group + group):
                    for j in range(4):
                        x[k, j] = power(x[k, j], tops[g])
                        powers += x[k, j]
                larger = max(top, tops[g])
                total = total * exp2_approx(top - larger) + powers * exp2_approx(tops[g] - larger)
                top = larger
            top, total = block_online(top, total)
            norm = float32(1) / total
            for g in range(groups):
                factor = exp2_approx(tops[g] - top) * norm
                for k in range(g * group, g * group + group):
                    for j in range(4):
                        x[k, j] *= factor
            if edge < C:
                out[row, edge] = power(edge_x, top) * norm
            to, more, mine = first, row + rows < N, thread + last * THREADS8 < whole
            row += rows
            head, whole, edge = ragged(row * C, C, thread)
            first = row * C + head + 4 * thread
            for k in range(last):
                store4(out, to + k * step, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
                if more:  # the piece's registers are free
                    x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(inp, first + k * step)
            if mine:
                store4(out, to + last * step, x[last, 0], x[last, 1], x[last, 2], x[last, 3])
            if more:
                x[last, 0], x[last, 1], x[last, 2], x[last, 3] = load_last8(
                    inp, first + last * step, thread + last * THREADS8 < whole
                )
                edge_x = inp[row, edge] if edge < C else LOWEST

    return softmax_forward_kernel8


@cuda.jit(device=True, cache=True)
def load_last8(inp, i, mine):
    if mine:
        return load4(inp, i)
    return LOWEST, LOWEST, LOWEST, LOWEST


@softmax_forward.version(8, "the row in registers, read once; the next row is loaded as this one is written")
def softmax_forward8(out, inp, *, stream=0):
    """Rows that are too short to fill the registers of a block, or too long to fit, go the way of version 7."""
    N, C = inp.shape
    if C < 2 * 4 * THREADS8 or C // 4 > PIECES8 * THREADS8:
        softmax_forward7(out, inp, block_size=min(1024, WARP * ceil_div(C, 4 * WARP)), stream=stream)
        return
    make_softmax_forward_kernel8(C)[min(N, multiprocessors()), THREADS8, stream](out, inp)
