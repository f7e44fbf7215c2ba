"""LayerNorm backward. With norm = (inp - mean) * rstd and dnorm = dout * weight, and means over the channels of a row:

    dinp    += (dnorm - mean(dnorm) - norm * mean(dnorm * norm)) * rstd
    dweight += sum over rows of dout * norm
    dbias   += sum over rows of dout

A row's gradient needs sums along the row, those of weight and bias sums down the columns. The story is told in
doc/layernorm.md.

version 1: a thread a row; every element is added to dweight and dbias by an atomic in global memory
version 2: a block gathers its rows' share of dweight and dbias in shared memory first: few global atomics
version 3: a warp a row: neighbouring lanes read neighbouring channels and never meet in an atomic
version 4: 16-byte loads and stores
version 5: a block a row, a thread keeps its columns: no atomics; a second kernel adds up the blocks' shares, in order
version 6: the same in registers, 16-byte loads, two rows on the way at once
"""

import functools

import numpy as np

import cpu_reference
from kernels.device import (
    WARP,
    big_shared,
    ceil_div,
    cuda,
    float32,
    load4,
    load4_streaming,
    multiprocessors,
    need,
    scratch,
    store4,
)  # fmt: skip
from kernels.op import Op
from kernels.reduce import block_sum2, warp_sum2, whole_warps

SHARED_BYTES = 227 * 1024  # that a block can have, compute capability 9.0


def backward_inputs(rng, N, C):
    """What the forward leaves behind: mean and rstd are inp's. The gradients are not zero: the op adds to them."""
    inp = rng.standard_normal((N, C), dtype=np.float32)
    return {
        "inp": inp,
        "mean": inp.mean(axis=1, dtype=np.float64).astype(np.float32),
        "rstd": (1 / np.sqrt(inp.var(axis=1, dtype=np.float64) + cpu_reference.EPS)).astype(np.float32),
        "weight": rng.standard_normal(C, dtype=np.float32),
        "dout": rng.standard_normal((N, C), dtype=np.float32),
        "dinp": rng.standard_normal((N, C), dtype=np.float32),
        "dweight": rng.standard_normal(C, dtype=np.float32),
        "dbias": rng.standard_normal(C, dtype=np.float32),
    }


layernorm_backward = Op(
    reference=cpu_reference.layernorm_backward,
    inputs=backward_inputs,
    outputs=lambda N, C: {},
    changed=("dinp", "dweight", "dbias"),
    bytes_moved=lambda N, C: 4 * (4 * N * C + 2 * N + 5 * C),
    shape={"N": 8192, "C": 1600},
    small={"N": 6, "C": 100},
    odd=[{"N": 3, "C": C} for C in (1, 3, 33, 100, 768, 1600, 1601)] + [{"N": 1, "C": 768}, {"N": 11, "C": 36}],
    trainer_shapes=[{"N": 4096, "C": 768}],
)


@cuda.jit(cache=True, fastmath=True)
def layernorm_backward_kernel1(dinp, dweight, dbias, dout, inp, weight, mean, rstd):
    row = cuda.grid(1)
    N, C = inp.shape
    if row < N:
        m, s = mean[row], rstd[row]
        dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
        for c in range(C):
            dnorm = dout[row, c] * weight[c]
            dnorm_mean += dnorm
            dnorm_norm_mean += dnorm * (inp[row, c] - m) * s
        dnorm_mean /= float32(C)
        dnorm_norm_mean /= float32(C)
        for c in range(C):
            norm = (inp[row, c] - m) * s
            dinp[row, c] += (dout[row, c] * weight[c] - dnorm_mean - norm * dnorm_norm_mean) * s
            cuda.atomic.add(dweight, c, dout[row, c] * norm)
            cuda.atomic.add(dbias, c, dout[row, c])


@layernorm_backward.version(1, "a thread a row, atomics in global memory", repeatable=False)
def layernorm_backward1(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, block_size=128, stream=0):
    """dinp, dout, inp: float32 (N, C); dweight, dbias, weight: (C,); mean, rstd: (N,). So in every version."""
    arguments = dinp, dweight, dbias, dout, inp, weight, mean, rstd
    layernorm_backward_kernel1[ceil_div(inp.shape[0], block_size), block_size, stream](*arguments)


@cuda.jit(cache=True, fastmath=True)
def layernorm_backward_kernel2(dinp, dweight, dbias, dout, inp, weight, mean, rstd):
    N, C = inp.shape
    sums = cuda.shared.array(0, float32)  # dweight's share, then dbias'
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for c in range(thread, 2 * C, threads):
        sums[c] = float32(0)
    cuda.syncthreads()
    row = cuda.grid(1)
    if row < N:
        m, s = mean[row], rstd[row]
        dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
        for c in range(C):
            dnorm = dout[row, c] * weight[c]
            dnorm_mean += dnorm
            dnorm_norm_mean += dnorm * (inp[row, c] - m) * s
        dnorm_mean /= float32(C)
        dnorm_norm_mean /= float32(C)
        c = thread % C
        for _ in range(C):  # each thread starts in a column of its own: they do not queue for one sum
            norm = (inp[row, c] - m) * s
            dinp[row, c] += (dout[row, c] * weight[c] - dnorm_mean - norm * dnorm_norm_mean) * s
            cuda.atomic.add(sums, c, dout[row, c] * norm)
            cuda.atomic.add(sums, C + c, dout[row, c])
            c = c + 1 if c + 1 < C else 0
    cuda.syncthreads()
    for c in range(thread, C, threads):
        cuda.atomic.add(dweight, c, sums[c])
        cuda.atomic.add(dbias, c, sums[C + c])


def room_for_sums(C: int) -> int:
    """The bytes that the sums of C columns for dweight and dbias take in shared memory."""
    need(8 * C <= SHARED_BYTES, f"needs 8 C bytes of shared memory a block, so C at most {SHARED_BYTES // 8}, got {C}")
    return 8 * C


@layernorm_backward.version(2, "sums in shared memory, then few global atomics", repeatable=False)
def layernorm_backward2(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, block_size=128, stream=0):
    N, C = inp.shape
    arguments = dinp, dweight, dbias, dout, inp, weight, mean, rstd
    big_shared(layernorm_backward_kernel2, ceil_div(N, block_size), block_size, stream, room_for_sums(C))(*arguments)


@cuda.jit(cache=True, fastmath=True)
def layernorm_backward_kernel3(dinp, dweight, dbias, dout, inp, weight, mean, rstd):
    N, C = inp.shape
    sums = cuda.shared.array(0, float32)
    thread, threads, lane = cuda.threadIdx.x, cuda.blockDim.x, cuda.laneid
    for c in range(thread, 2 * C, threads):
        sums[c] = float32(0)
    cuda.syncthreads()
    for row in range(cuda.grid(1) // WARP, N, cuda.gridsize(1) // WARP):
        m, s = mean[row], rstd[row]
        dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
        for c in range(lane, C, WARP):
            dnorm = dout[row, c] * weight[c]
            dnorm_mean += dnorm
            dnorm_norm_mean += dnorm * (inp[row, c] - m) * s
        dnorm_mean, dnorm_norm_mean = warp_sum2(dnorm_mean, dnorm_norm_mean)
        dnorm_mean /= float32(C)
        dnorm_norm_mean /= float32(C)
        for c in range(lane, C, WARP):
            norm = (inp[row, c] - m) * s
            dinp[row, c] += (dout[row, c] * weight[c] - dnorm_mean - norm * dnorm_norm_mean) * s
            cuda.atomic.add(sums, c, dout[row, c] * norm)  # against the block's other warps
            cuda.atomic.add(sums, C + c, dout[row, c])
    cuda.syncthreads()
    for c in range(thread, C, threads):
        cuda.atomic.add(dweight, c, sums[c])
        cuda.atomic.add(dbias, c, sums[C + c])


@layernorm_backward.version(3, "a warp a row, blocks that stay for many rows", repeatable=False)
def layernorm_backward3(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, block_size=256, stream=0):
    N, C = inp.shape
    arguments = dinp, dweight, dbias, dout, inp, weight, mean, rstd
    blocks = min(ceil_div(N, whole_warps(block_size)), 2 * multiprocessors())
    big_shared(layernorm_backward_kernel3, blocks, block_size, stream, room_for_sums(C))(*arguments)


@cuda.jit(cache=True, fastmath=True)
def layernorm_backward_kernel4(dinp, dweight, dbias, dout, inp, weight, mean, rstd):
    N, C = inp.shape
    Q = C // 4  # the sum for column 4 q + j stands at j Q + q: neighbouring lanes use neighbouring banks
    sums = cuda.shared.array(0, float32)
    thread, threads, lane = cuda.threadIdx.x, cuda.blockDim.x, cuda.laneid
    for c in range(thread, 2 * C, threads):
        sums[c] = float32(0)
    cuda.syncthreads()
    for row in range(cuda.grid(1) // WARP, N, cuda.gridsize(1) // WARP):
        m, s = mean[row], rstd[row]
        dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
        for q in range(lane, Q, WARP):
            d, x, w = load4(dout, row * C + 4 * q), load4(inp, row * C + 4 * q), load4(weight, 4 * q)
            for j in range(4):
                dnorm_mean += d[j] * w[j]
                dnorm_norm_mean += d[j] * w[j] * (x[j] - m) * s
        dnorm_mean, dnorm_norm_mean = warp_sum2(dnorm_mean, dnorm_norm_mean)
        dnorm_mean /= float32(C)
        dnorm_norm_mean /= float32(C)
        g = cuda.local.array(4, float32)
        for q in range(lane, Q, WARP):
            d, x, w = load4(dout, row * C + 4 * q), load4(inp, row * C + 4 * q), load4(weight, 4 * q)
            g[0], g[1], g[2], g[3] = load4(dinp, row * C + 4 * q)
            for j in range(4):
                norm = (x[j] - m) * s
                g[j] += (d[j] * w[j] - dnorm_mean - norm * dnorm_norm_mean) * s
                cuda.atomic.add(sums, j * Q + q, d[j] * norm)
                cuda.atomic.add(sums, C + j * Q + q, d[j])
            store4(dinp, row * C + 4 * q, g[0], g[1], g[2], g[3])
    cuda.syncthreads()
    for q in range(thread, Q, threads):
        for j in range(4):
            cuda.atomic.add(dweight, 4 * q + j, sums[j * Q + q])
            cuda.atomic.add(dbias, 4 * q + j, sums[C + j * Q + q])


@layernorm_backward.version(4, "16-byte loads and stores", repeatable=False)
def layernorm_backward4(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, block_size=256, stream=0):
    """Rows that are not a multiple of 16 bytes go the way of version 3."""
    N, C = inp.shape
    arguments = dinp, dweight, dbias, dout, inp, weight, mean, rstd
    kernel = layernorm_backward_kernel3 if C % 4 else layernorm_backward_kernel4
    blocks = min(ceil_div(N, whole_warps(block_size)), 2 * multiprocessors())
    big_shared(kernel, blocks, block_size, stream, room_for_sums(C))(*arguments)


@cuda.jit(cache=True, fastmath=True)
def layernorm_backward_kernel5(dinp, partials, dout, inp, weight, mean, rstd):
    N, C = inp.shape
    sums = cuda.shared.array(0, float32)
    thread, threads, block = cuda.threadIdx.x, cuda.blockDim.x, cuda.blockIdx.x
    for c in range(thread, C, threads):  # a thread's columns are its own from here to the end: no barrier, no atomic
        sums[c] = sums[C + c] = float32(0)
    for row in range(block, N, cuda.gridDim.x):
        m, s = mean[row], rstd[row]
        dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
        for c in range(thread, C, threads):
            dnorm = dout[row, c] * weight[c]
            dnorm_mean += dnorm
            dnorm_norm_mean += dnorm * (inp[row, c] - m) * s
        dnorm_mean, dnorm_norm_mean = block_sum2(dnorm_mean, dnorm_norm_mean)
        dnorm_mean /= float32(C)
        dnorm_norm_mean /= float32(C)
        for c in range(thread, C, threads):
            norm = (inp[row, c] - m) * s
            dinp[row, c] += (dout[row, c] * weight[c] - dnorm_mean - norm * dnorm_norm_mean) * s
            sums[c] += dout[row, c] * norm
            sums[C + c] += dout[row, c]
    for c in range(thread, C, threads):
        partials[0, block, c] = sums[c]
        partials[1, block, c] = sums[C + c]


@cuda.jit(cache=True, fastmath=True)
def add_partials_kernel(gradients, partials):
    """gradients: a tuple of arrays (C,), each grows by its partials (blocks, C): a block of the second stage adds up 32
    columns of one of them, its warps share the rows, and warp 0 adds the warps' sums. The order is always the same."""
    sums = cuda.shared.array((WARP, WARP), float32)
    lane, warp, warps = cuda.laneid, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    which, c = cuda.blockIdx.y, cuda.blockIdx.x * WARP + lane
    blocks, C = partials.shape[1], partials.shape[2]
    total = float32(0)
    if c < C:
        block = warp
        while block + 3 * warps < blocks:  # four loads on the way at once
            a, b = partials[which, block, c], partials[which, block + warps, c]
            total += (a + b) + (partials[which, block + 2 * warps, c] + partials[which, block + 3 * warps, c])
            block += 4 * warps
        while block < blocks:
            total += partials[which, block, c]
            block += warps
    sums[warp, lane] = total
    cuda.syncthreads()
    if warp == 0 and c < C:
        other = 1
        while other < warps:
            total += sums[other, lane]
            other += 1
        gradients[which][c] += total


def add_partials(gradients, partials, stream) -> None:
    """The second stage: gradients[k] += partials[k].sum(axis=0)."""
    count, blocks, C = partials.shape
    warps = min(WARP, ceil_div(blocks, 4))
    add_partials_kernel[(ceil_div(C, WARP), count), WARP * warps, stream](gradients, partials)


@layernorm_backward.version(5, "a block a row, a thread keeps its columns; two stages, no atomics")
def layernorm_backward5(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, block_size=256, stream=0):
    N, C = inp.shape
    whole_warps(block_size)
    blocks = min(N, 2 * multiprocessors())
    partials = scratch("layernorm_backward", (2, blocks, C))
    arguments = dinp, partials, dout, inp, weight, mean, rstd
    big_shared(layernorm_backward_kernel5, blocks, block_size, stream, room_for_sums(C))(*arguments)
    add_partials((dweight, dbias), partials, stream)


def layout6(C: int) -> tuple[int, int]:
    """How a block covers a row of C channels: its threads, and the 16-byte pieces that each holds."""
    pieces = ceil_div(C, 4 * 512)
    return WARP * ceil_div(C, 4 * WARP * pieces), pieces


ROWS6 = 2  # on the way at once


@functools.cache
def make_layernorm_backward_kernel6(C, with_columns):
    """The kernel for rows of C channels; with_columns: its partials hold the finished dinp's column sums as well."""
    threads, pieces = layout6(C)
    sums = 2 * ROWS6

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(threads, max(1, 832 // threads)))
    def layernorm_backward_kernel6(dinp, partials, dout, inp, weight, mean, rstd):
        shared = cuda.shared.array((2, sums, 16), float32, alignment=16)
        w, dw = cuda.local.array((pieces, 4), float32), cuda.local.array((pieces, 4), float32)
        db, columns = cuda.local.array((pieces, 4), float32), cuda.local.array((pieces, 4), float32)
        d, norm = cuda.local.array((ROWS6, pieces, 4), float32), cuda.local.array((ROWS6, pieces, 4), float32)
        g, s = cuda.local.array((ROWS6, pieces, 4), float32), cuda.local.array(ROWS6, float32)
        N, thread, block = inp.shape[0], cuda.threadIdx.x, cuda.blockIdx.x
        for k in range(pieces):
            for j in range(4):
                w[k, j] = dw[k, j] = db[k, j] = columns[k, j] = float32(0)
            c = 4 * (thread + threads * k)
            if c < C:
                w[k, 0], w[k, 1], w[k, 2], w[k, 3] = load4(weight, c)
        turn, first = 0, ROWS6 * block
        while first < N:
            for r in range(ROWS6):
                for k in range(pieces):
                    for j in range(4):
                        d[r, k, j] = norm[r, k, j] = float32(0)
                    c = 4 * (thread + threads * k)
                    if c < C and first + r < N:
                        i = (first + r) * C + c
                        d[r, k, 0], d[r, k, 1], d[r, k, 2], d[r, k, 3] = load4_streaming(dout, i)
                        norm[r, k, 0], norm[r, k, 1], norm[r, k, 2], norm[r, k, 3] = load4_streaming(inp, i)
                        g[r, k, 0], g[r, k, 1], g[r, k, 2], g[r, k, 3] = load4(dinp, i)
            for r in range(ROWS6):
                m, s[r] = mean[min(first + r, N - 1)], rstd[min(first + r, N - 1)]
                a, b = float32(0), float32(0)
                for k in range(pieces):
                    for j in range(4):
                        norm[r, k, j] = (norm[r, k, j] - m) * s[r]
                        a += d[r, k, j] * w[k, j]
                        b += d[r, k, j] * w[k, j] * norm[r, k, j]
                a, b = warp_sum2(a, b)
                if thread & 31 == 0:
                    shared[turn, 2 * r, thread >> 5] = a
                    shared[turn, 2 * r + 1, thread >> 5] = b
            cuda.syncthreads()
            for r in range(ROWS6):
                dnorm_mean, dnorm_norm_mean = float32(0), float32(0)
                for warp in range(threads // WARP):
                    dnorm_mean += shared[turn, 2 * r, warp]
                    dnorm_norm_mean += shared[turn, 2 * r + 1, warp]
                dnorm_mean /= float32(C)
                dnorm_norm_mean /= float32(C)
                for k in range(pieces):
                    c = 4 * (thread + threads * k)
                    if c < C and first + r < N:
                        for j in range(4):
                            dnorm = d[r, k, j] * w[k, j]
                            g[r, k, j] += (dnorm - dnorm_mean - norm[r, k, j] * dnorm_norm_mean) * s[r]
                            dw[k, j] += d[r, k, j] * norm[r, k, j]
                            db[k, j] += d[r, k, j]
                            if with_columns:
                                columns[k, j] += g[r, k, j]
                        store4(dinp, (first + r) * C + c, g[r, k, 0], g[r, k, 1], g[r, k, 2], g[r, k, 3])
            turn = 1 - turn  # the next rows' sums go elsewhere: one barrier is enough
            first += ROWS6 * cuda.gridDim.x
        for k in range(pieces):
            c = 4 * (thread + threads * k)
            if c < C:
                i, stage = block * C + c, cuda.gridDim.x * C
                store4(partials, i, dw[k, 0], dw[k, 1], dw[k, 2], dw[k, 3])
                store4(partials, i + stage, db[k, 0], db[k, 1], db[k, 2], db[k, 3])
                if with_columns:
                    store4(partials, i + 2 * stage, columns[k, 0], columns[k, 1], columns[k, 2], columns[k, 3])

    return layernorm_backward_kernel6


def launch_backward6(dinp, gradients, dout, inp, weight, mean, rstd, stream) -> None:
    """Both stages. gradients: (dweight, dbias), or (dweight, dbias, dprojb) if dprojb is to get dinp's column sums."""
    N, C = inp.shape
    threads = layout6(C)[0]
    blocks = min(ceil_div(N, ROWS6), multiprocessors() * max(1, min(16, 832 // threads)))
    partials = scratch("layernorm_backward", (len(gradients), blocks, C))
    kernel = make_layernorm_backward_kernel6(C, len(gradients) == 3)
    kernel[blocks, threads, stream](dinp, partials, dout, inp, weight, mean, rstd)
    add_partials(gradients, partials, stream)


@layernorm_backward.version(6, "registers, 16-byte loads, two rows on the way at once; two stages")
def layernorm_backward6(dinp, dweight, dbias, dout, inp, weight, mean, rstd, *, stream=0):
    """Rows that are not a multiple of 16 bytes, or longer than 8192, go the way of version 5."""
    C = inp.shape[1]
    if C % 4 or C > 8192:
        layernorm_backward5(dinp, dweight, dbias, dout, inp, weight, mean, rstd, stream=stream)
        return
    launch_backward6(dinp, (dweight, dbias), dout, inp, weight, mean, rstd, stream)
