"""LayerNorm forward: out = (inp - mean) * rstd * weight + bias, mean and rstd over the C channels of each row.

The story is told in doc/layernorm.md.

version 1: a thread a row
version 2: a block a row, so that neighbouring threads read neighbouring channels; sums by a tree in shared memory
version 3: a warp a row: lanes add up by shuffles, no barrier, one kernel
version 4: mean and variance in one pass over the row: it is read twice instead of three times
version 5: a block a row, shuffles inside the warps, shared memory between them: for few or long rows
version 6: a warp a row, held in registers, 16-byte loads and stores: the row is read once
version 7: warps that stay, with weight and bias in registers too, and load the next row while they work on this one
Adding the residual in the same kernel is an op of its own: fused_residual_forward in fused.py.
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.device import WARP, ceil_div, cuda, float32, load4, load4_readonly, multiprocessors, need, store4
from kernels.op import Op
from kernels.reduce import block_sum2, moments, tree_sum, warp_sum, warp_sum2, whole_warps


def layernorm_inputs(rng, N, C):
    """Rows whose mean is far from 0, where a relative error would say nothing of it. Every second one is a hundredth as large, so
    that what is added to its variance counts."""
    inp = rng.standard_normal((N, C), dtype=np.float32) + np.float32(1)
    inp[1::2] *= np.float32(0.01)
    return {
        "inp": inp,
        "weight": rng.standard_normal(C, dtype=np.float32),
        "bias": rng.standard_normal(C, dtype=np.float32),
    }


layernorm_forward = Op(
    reference=cpu_reference.layernorm_forward,
    inputs=layernorm_inputs,
    outputs=lambda N, C: {"out": (N, C), "mean": N, "rstd": N},
    bytes_moved=lambda N, C: 4 * (2 * N * C + 2 * N + 2 * C),
    shape={"N": 8192, "C": 768},
    small={"N": 6, "C": 100},
    odd=[{"N": 3, "C": C} for C in (1, 3, 33, 100, 768, 1600, 1601)] + [{"N": 1, "C": 768}],
    trainer_shapes=[{"N": 4096, "C": 768}],
    large=[{"N": 131_072, "C": 768}],
)

EPS = float32(1e-5)  # a float32: with a bare 1e-5 the sum below it would be a float64


@cuda.jit(cache=True, fastmath=True)
def layernorm_forward_kernel1(out, mean, rstd, inp, weight, bias):
    row = cuda.grid(1)
    N, C = inp.shape
    if row < N:
        m = float32(0)
        for c in range(C):
            m += inp[row, c]
        m /= float32(C)
        v = float32(0)
        for c in range(C):
            v += (inp[row, c] - m) ** 2
        s = float32(1) / math.sqrt(v / float32(C) + EPS)
        for c in range(C):
            out[row, c] = (inp[row, c] - m) * s * weight[c] + bias[c]
        mean[row] = m
        rstd[row] = s


@layernorm_forward.version(1, "a thread a row")
def layernorm_forward1(out, mean, rstd, inp, weight, bias, *, block_size=128, stream=0):
    """out, inp: float32 (N, C); mean, rstd: (N,); weight, bias: (C,), on the device. So in every version."""
    N = inp.shape[0]
    layernorm_forward_kernel1[ceil_div(N, block_size), block_size, stream](out, mean, rstd, inp, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def mean_kernel2(mean, inp):
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    C = inp.shape[1]
    x = float32(0)
    for c in range(thread, C, cuda.blockDim.x):
        x += inp[row, c]
    total = tree_sum(cuda.shared.array(0, float32), x)
    if thread == 0:
        mean[row] = total / float32(C)


@cuda.jit(cache=True, fastmath=True)
def rstd_kernel2(rstd, inp, mean):
    row, thread = cuda.blockIdx.x, cuda.threadIdx.x
    C = inp.shape[1]
    m = mean[row]
    x = float32(0)
    for c in range(thread, C, cuda.blockDim.x):
        x += (inp[row, c] - m) ** 2
    total = tree_sum(cuda.shared.array(0, float32), x)
    if thread == 0:
        rstd[row] = float32(1) / math.sqrt(total / float32(C) + EPS)


@cuda.jit(cache=True, fastmath=True)
def normalize_kernel2(out, inp, mean, rstd, weight, bias):
    N, C = inp.shape
    i = cuda.grid(1)
    if i < N * C:
        row, c = i // C, i % C
        out[row, c] = (inp[row, c] - mean[row]) * rstd[row] * weight[c] + bias[c]


@layernorm_forward.version(2, "a block a row, sums by a tree in shared memory, three kernels")
def layernorm_forward2(out, mean, rstd, inp, weight, bias, *, block_size=256, stream=0):
    need(block_size & (block_size - 1) == 0, f"needs a block size that is a power of two, got {block_size}")
    N, C = inp.shape
    mean_kernel2[N, block_size, stream, 4 * block_size](mean, inp)
    rstd_kernel2[N, block_size, stream, 4 * block_size](rstd, inp, mean)
    normalize_kernel2[ceil_div(N * C, block_size), block_size, stream](out, inp, mean, rstd, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def layernorm_forward_kernel3(out, mean, rstd, inp, weight, bias):
    lane, row = cuda.laneid, cuda.grid(1) // WARP
    N, C = inp.shape
    if row < N:  # for a whole warp or for none of it, as shuffles need
        m = float32(0)
        for c in range(lane, C, WARP):
            m += inp[row, c]
        m = warp_sum(m) / float32(C)
        v = float32(0)
        for c in range(lane, C, WARP):
            v += (inp[row, c] - m) ** 2
        s = float32(1) / math.sqrt(warp_sum(v) / float32(C) + EPS)
        for c in range(lane, C, WARP):
            out[row, c] = (inp[row, c] - m) * s * weight[c] + bias[c]
        if lane == 0:
            mean[row] = m
            rstd[row] = s


@layernorm_forward.version(3, "a warp a row, sums by shuffles")
def layernorm_forward3(out, mean, rstd, inp, weight, bias, *, block_size=256, stream=0):
    blocks = ceil_div(inp.shape[0], whole_warps(block_size))
    layernorm_forward_kernel3[blocks, block_size, stream](out, mean, rstd, inp, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def layernorm_forward_kernel4(out, mean, rstd, inp, weight, bias):
    lane, row = cuda.laneid, cuda.grid(1) // WARP
    N, C = inp.shape
    if row < N:
        pivot = inp[row, 0]  # without it a mean far from 0 would drown the variance: E[x^2] - E[x]^2 cancels
        total, squares = float32(0), float32(0)
        for c in range(lane, C, WARP):
            x = inp[row, c] - pivot
            total += x
            squares += x * x
        total, squares = warp_sum2(total, squares)
        m, v = moments(pivot, total, squares, C)
        s = float32(1) / math.sqrt(v + EPS)
        for c in range(lane, C, WARP):
            out[row, c] = (inp[row, c] - m) * s * weight[c] + bias[c]
        if lane == 0:
            mean[row] = m
            rstd[row] = s


@layernorm_forward.version(4, "mean and variance in one pass over the row")
def layernorm_forward4(out, mean, rstd, inp, weight, bias, *, block_size=256, stream=0):
    blocks = ceil_div(inp.shape[0], whole_warps(block_size))
    layernorm_forward_kernel4[blocks, block_size, stream](out, mean, rstd, inp, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def layernorm_forward_kernel5(out, mean, rstd, inp, weight, bias):
    thread, row = cuda.threadIdx.x, cuda.blockIdx.x
    C = inp.shape[1]
    pivot = inp[row, 0]
    total, squares = float32(0), float32(0)
    for c in range(thread, C, cuda.blockDim.x):
        x = inp[row, c] - pivot
        total += x
        squares += x * x
    total, squares = block_sum2(total, squares)
    m, v = moments(pivot, total, squares, C)
    s = float32(1) / math.sqrt(v + EPS)
    for c in range(thread, C, cuda.blockDim.x):
        out[row, c] = (inp[row, c] - m) * s * weight[c] + bias[c]
    if thread == 0:
        mean[row] = m
        rstd[row] = s


@layernorm_forward.version(5, "a block a row, shuffles inside the warps, shared memory between them")
def layernorm_forward5(out, mean, rstd, inp, weight, bias, *, block_size=256, stream=0):
    whole_warps(block_size)
    layernorm_forward_kernel5[inp.shape[0], block_size, stream](out, mean, rstd, inp, weight, bias)


@functools.cache
def make_layernorm_forward_kernel6(C):
    """The kernel for rows of C channels. C is a constant to the compiler: loops unroll, the array becomes registers."""
    pieces = ceil_div(C, 4 * WARP)  # of 16 bytes, that a lane holds

    @cuda.jit(cache=True, fastmath=True)
    def layernorm_forward_kernel6(out, mean, rstd, inp, weight, bias):
        x = cuda.local.array((pieces, 4), float32)
        lane, row = cuda.threadIdx.x & 31, cuda.grid(1) // WARP
        if row >= inp.shape[0]:
            return
        base = row * C
        m = float32(0)
        for k in range(pieces):
            c = 4 * (lane + WARP * k)
            if c < C:  # always, for all pieces but the last
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = load4(inp, base + c)
                m += x[k, 0] + x[k, 1] + x[k, 2] + x[k, 3]
        m = warp_sum(m) / float32(C)
        v = float32(0)
        for k in range(pieces):
            if 4 * (lane + WARP * k) < C:
                for j in range(4):
                    v += (x[k, j] - m) ** 2
        s = float32(1) / math.sqrt(warp_sum(v) / float32(C) + EPS)
        for k in range(pieces):
            c = 4 * (lane + WARP * k)
            if c < C:
                w0, w1, w2, w3 = load4_readonly(weight, c)
                b0, b1, b2, b3 = load4_readonly(bias, c)
                x0, x1, x2, x3 = (x[k, 0] - m) * s, (x[k, 1] - m) * s, (x[k, 2] - m) * s, (x[k, 3] - m) * s
                store4(out, base + c, x0 * w0 + b0, x1 * w1 + b1, x2 * w2 + b2, x3 * w3 + b3)
        if lane == 0:
            mean[row] = m
            rstd[row] = s

    return layernorm_forward_kernel6


@layernorm_forward.version(6, "a warp a row in registers, 16-byte loads and stores")
def layernorm_forward6(out, mean, rstd, inp, weight, bias, *, block_size=128, stream=0):
    """Rows that are not a multiple of 16 bytes, or have no room in a warp's registers, go the way of version 5."""
    N, C = inp.shape
    if C % 4 or C > 4096:
        layernorm_forward5(out, mean, rstd, inp, weight, bias, stream=stream)
        return
    blocks = ceil_div(N, whole_warps(block_size))
    make_layernorm_forward_kernel6(C)[blocks, block_size, stream](out, mean, rstd, inp, weight, bias)


WARPS7 = 16  # a multiprocessor's, 128 registers a thread: each has a row on the way from memory and one at work


@functools.cache
def make_layernorm_forward_kernel7(C):
    pieces = ceil_div(C, 4 * WARP)

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(128, WARPS7 // 4))
    def layernorm_forward_kernel7(out, mean, rstd, inp, weight, bias):
        w, b = cuda.local.array((pieces, 4), float32), cuda.local.array((pieces, 4), float32)
        x, ahead = cuda.local.array((pieces, 4), float32), cuda.local.array((pieces, 4), float32)
        lane, row, warps = cuda.threadIdx.x & 31, cuda.grid(1) // WARP, cuda.gridsize(1) // WARP
        N = inp.shape[0]
        if row >= N:
            return
        for k in range(pieces):
            c = 4 * (lane + WARP * k)
            if c < C:
                ahead[k, 0], ahead[k, 1], ahead[k, 2], ahead[k, 3] = load4(inp, row * C + c)
                w[k, 0], w[k, 1], w[k, 2], w[k, 3] = load4_readonly(weight, c)
                b[k, 0], b[k, 1], b[k, 2], b[k, 3] = load4_readonly(bias, c)
        while row < N:
            m = float32(0)
            for k in range(pieces):
                c = 4 * (lane + WARP * k)
                if c < C:
                    for j in range(4):
                        x[k, j] = ahead[k, j]
                        m += x[k, j]
                    if row + warps < N:
                        ahead[k, 0], ahead[k, 1], ahead[k, 2], ahead[k, 3] = load4(inp, (row + warps) * C + c)
            m = warp_sum(m) / float32(C)
            v = float32(0)
            for k in range(pieces):
                if 4 * (lane + WARP * k) < C:
                    for j in range(4):
                        x[k, j] -= m
                        v += x[k, j] * x[k, j]
            s = float32(1) / math.sqrt(warp_sum(v) / float32(C) + EPS)
            for k in range(pieces):
                c = 4 * (lane + WARP * k)
                if c < C:
                    for j in range(4):
                        x[k, j] = x[k, j] * s * w[k, j] + b[k, j]
                    store4(out, row * C + c, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
            if lane == 0:
                mean[row] = m
                rstd[row] = s
            row += warps

    return layernorm_forward_kernel7


@layernorm_forward.version(7, "warps that stay: weight and bias in registers, the next row on its way")
def layernorm_forward7(out, mean, rstd, inp, weight, bias, *, stream=0):
    """Rows longer than 768 leave too few registers for weight and bias: they go the way of version 6."""
    N, C = inp.shape
    if C % 4 or C > 768:
        layernorm_forward6(out, mean, rstd, inp, weight, bias, stream=stream)
        return
    blocks = min(ceil_div(N, 4), WARPS7 // 4 * multiprocessors())
    make_layernorm_forward_kernel7(C)[blocks, 128, stream](out, mean, rstd, inp, weight, bias)
