"""LayerNorm fused with the residual that stands before it in every transformer block, forward and backward.

Forward: residual = inp1 + inp2; out = layernorm(residual). The sum is normalized while it is still at hand.

version 1: two kernels, the residual's and layernorm's, both naive
version 2: one kernel, a thread a row
version 3: a warp a row: lanes add up by shuffles
version 4: mean and variance in one pass over the row
version 5: the row, weight and bias in shared memory, 16-byte loads and stores: nothing is read twice from the caches
version 6: the row in registers, its loads all on the way at once

Backward: dresidual += layernorm's backward of dout. The finished dresidual is the gradient of inp1 and of inp2 alike,
so its column sums, dprojb, are the bias gradient of the projection that made inp2.

version 1: layernorm's backward in two stages, then a kernel for the column sums, a thread a column
version 2: the column sums in the same pass, while a row's gradient is still in registers
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.device import (
    WARP,
    big_shared,
    ceil_div,
    cuda,
    float32,
    load4,
    load4_readonly,
    load4_streaming,
    multiprocessors,
    store4,
)  # fmt: skip
from kernels.layernorm.backward import backward_inputs, launch_backward6, layernorm_backward5
from kernels.layernorm.forward import layernorm_forward1, layernorm_inputs
from kernels.op import Op
from kernels.reduce import moments, warp_sum, warp_sum2, whole_warps

EPS = float32(1e-5)  # layernorm's; here too, since numba's cache looks at a kernel's own file


def fused_forward_inputs(rng, N, C):
    values = layernorm_inputs(rng, N, C)
    return {"inp1": values.pop("inp"), "inp2": rng.standard_normal((N, C), dtype=np.float32), **values}


fused_residual_forward = Op(
    reference=cpu_reference.fused_residual_forward,
    inputs=fused_forward_inputs,
    outputs=lambda N, C: {"residual": (N, C), "out": (N, C), "mean": N, "rstd": N},
    bytes_moved=lambda N, C: 4 * (4 * N * C + 2 * N + 2 * C),
    shape={"N": 8192, "C": 768},
    small={"N": 6, "C": 100},
    odd=[{"N": 3, "C": C} for C in (1, 3, 33, 100, 768, 1600, 1601)] + [{"N": 1, "C": 768}],
    trainer_shapes=[{"N": 4096, "C": 768}],
)


@cuda.jit(cache=True, fastmath=True)
def residual_kernel1(out, inp1, inp2):
    N, C = out.shape
    i = cuda.grid(1)
    if i < N * C:
        out[i // C, i % C] = inp1[i // C, i % C] + inp2[i // C, i % C]


@fused_residual_forward.version(1, "two kernels: the residual, then layernorm's version 1")
def fused_residual_forward1(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=256, stream=0):
    """residual, out, inp1, inp2: float32 (N, C); mean, rstd: (N,); weight, bias: (C,). So in every version."""
    residual_kernel1[ceil_div(inp1.size, block_size), block_size, stream](residual, inp1, inp2)
    layernorm_forward1(out, mean, rstd, residual, weight, bias, stream=stream)


@cuda.jit(cache=True, fastmath=True)
def fused_residual_forward_kernel2(residual, out, mean, rstd, inp1, inp2, weight, bias):
    row = cuda.grid(1)
    N, C = inp1.shape
    if row < N:
        m = float32(0)
        for c in range(C):
            x = inp1[row, c] + inp2[row, c]
            residual[row, c] = x
            m += x
        m /= float32(C)
        v = float32(0)
        for c in range(C):
            v += (residual[row, c] - m) ** 2
        s = float32(1) / math.sqrt(v / float32(C) + EPS)
        for c in range(C):
            out[row, c] = (residual[row, c] - m) * s * weight[c] + bias[c]
        mean[row] = m
        rstd[row] = s


@fused_residual_forward.version(2, "one kernel, a thread a row")
def fused_residual_forward2(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=128, stream=0):
    blocks = ceil_div(inp1.shape[0], block_size)
    fused_residual_forward_kernel2[blocks, block_size, stream](residual, out, mean, rstd, inp1, inp2, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def fused_residual_forward_kernel3(residual, out, mean, rstd, inp1, inp2, weight, bias):
    lane, row = cuda.laneid, cuda.grid(1) // WARP
    N, C = inp1.shape
    if row < N:
        m = float32(0)
        for c in range(lane, C, WARP):
            x = inp1[row, c] + inp2[row, c]
            residual[row, c] = x
            m += x
        m = warp_sum(m) / float32(C)
        v = float32(0)
        for c in range(lane, C, WARP):  # a lane reads only what it wrote itself: no barrier
            v += (residual[row, c] - m) ** 2
        s = float32(1) / math.sqrt(warp_sum(v) / float32(C) + EPS)
        for c in range(lane, C, WARP):
            out[row, c] = (residual[row, c] - m) * s * weight[c] + bias[c]
        if lane == 0:
            mean[row] = m
            rstd[row] = s


@fused_residual_forward.version(3, "a warp a row, sums by shuffles")
def fused_residual_forward3(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=256, stream=0):
    blocks = ceil_div(inp1.shape[0], whole_warps(block_size))
    fused_residual_forward_kernel3[blocks, block_size, stream](residual, out, mean, rstd, inp1, inp2, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def fused_residual_forward_kernel4(residual, out, mean, rstd, inp1, inp2, weight, bias):
    lane, row = cuda.laneid, cuda.grid(1) // WARP
    N, C = inp1.shape
    if row < N:
        pivot = inp1[row, 0] + inp2[row, 0]
        total, squares = float32(0), float32(0)
        for c in range(lane, C, WARP):
            x = inp1[row, c] + inp2[row, c]
            residual[row, c] = x
            total += x - pivot
            squares += (x - pivot) ** 2
        total, squares = warp_sum2(total, squares)
        m, v = moments(pivot, total, squares, C)
        s = float32(1) / math.sqrt(v + EPS)
        for c in range(lane, C, WARP):
            out[row, c] = (residual[row, c] - m) * s * weight[c] + bias[c]
        if lane == 0:
            mean[row] = m
            rstd[row] = s


@fused_residual_forward.version(4, "mean and variance in one pass over the row")
def fused_residual_forward4(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=256, stream=0):
    blocks = ceil_div(inp1.shape[0], whole_warps(block_size))
    fused_residual_forward_kernel4[blocks, block_size, stream](residual, out, mean, rstd, inp1, inp2, weight, bias)


@cuda.jit(cache=True, fastmath=True)
def fused_residual_forward_kernel5(residual, out, mean, rstd, inp1, inp2, weight, bias):
    shared = cuda.shared.array(0, float32, alignment=16)  # weight, bias, then a row for each warp
    N, C = inp1.shape
    thread, lane, warps = cuda.threadIdx.x, cuda.laneid, cuda.gridsize(1) // WARP
    for c in range(4 * thread, C, 4 * cuda.blockDim.x):
        w0, w1, w2, w3 = load4(weight, c)
        b0, b1, b2, b3 = load4(bias, c)
        store4(shared, c, w0, w1, w2, w3)
        store4(shared, C + c, b0, b1, b2, b3)
    cuda.syncthreads()
    mine = (2 + (thread >> 5)) * C
    for row in range(cuda.grid(1) // WARP, N, warps):
        m = float32(0)
        for c in range(4 * lane, C, 4 * WARP):
            x0, x1, x2, x3 = load4_streaming(inp1, row * C + c)
            y0, y1, y2, y3 = load4_streaming(inp2, row * C + c)
            x0, x1, x2, x3 = x0 + y0, x1 + y1, x2 + y2, x3 + y3
            store4(residual, row * C + c, x0, x1, x2, x3)
            store4(shared, mine + c, x0, x1, x2, x3)
            m += x0 + x1 + x2 + x3
        m = warp_sum(m) / float32(C)
        v = float32(0)
        for c in range(4 * lane, C, 4 * WARP):
            x0, x1, x2, x3 = load4(shared, mine + c)
            v += (x0 - m) ** 2 + (x1 - m) ** 2 + (x2 - m) ** 2 + (x3 - m) ** 2
        s = float32(1) / math.sqrt(warp_sum(v) / float32(C) + EPS)
        for c in range(4 * lane, C, 4 * WARP):
            x0, x1, x2, x3 = load4(shared, mine + c)
            w0, w1, w2, w3 = load4(shared, c)
            b0, b1, b2, b3 = load4(shared, C + c)
            x0, x1, x2, x3 = (x0 - m) * s, (x1 - m) * s, (x2 - m) * s, (x3 - m) * s
            store4(out, row * C + c, x0 * w0 + b0, x1 * w1 + b1, x2 * w2 + b2, x3 * w3 + b3)
        if lane == 0:
            mean[row] = m
            rstd[row] = s


@fused_residual_forward.version(5, "row, weight and bias in shared memory, 16-byte loads and stores")
def fused_residual_forward5(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=128, stream=0):
    """Rows that are not a multiple of 16 bytes, or that shared memory cannot hold, go the way of version 4."""
    N, C = inp1.shape
    arguments = residual, out, mean, rstd, inp1, inp2, weight, bias
    shared_bytes = 4 * C * (2 + whole_warps(block_size))
    if C % 4 or shared_bytes > 227 * 1024:
        fused_residual_forward4(*arguments, stream=stream)
        return
    blocks = min(ceil_div(N, block_size // WARP), 8 * multiprocessors())
    big_shared(fused_residual_forward_kernel5, blocks, block_size, stream, shared_bytes)(*arguments)


@functools.cache
def make_fused_residual_forward_kernel6(C):
    """The kernel for rows of C channels, a constant to the compiler: the row's array becomes registers."""
    pieces = ceil_div(C, 4 * WARP)  # of 16 bytes, that a lane holds

    @cuda.jit(cache=True, fastmath=True)
    def fused_residual_forward_kernel6(residual, out, mean, rstd, inp1, inp2, weight, bias):
        x = cuda.local.array((pieces, 4), float32)
        lane, row = cuda.threadIdx.x & 31, cuda.grid(1) // WARP
        if row >= inp1.shape[0]:
            return
        base = row * C
        for k in range(pieces):
            c = 4 * (lane + WARP * k)
            if c < C:  # always, for all pieces but the last
                a0, a1, a2, a3 = load4_streaming(inp1, base + c)
                b0, b1, b2, b3 = load4_streaming(inp2, base + c)
                x[k, 0], x[k, 1], x[k, 2], x[k, 3] = a0 + b0, a1 + b1, a2 + b2, a3 + b3
        m = float32(0)
        for k in range(pieces):
            c = 4 * (lane + WARP * k)
            if c < C:
                store4(residual, base + c, x[k, 0], x[k, 1], x[k, 2], x[k, 3])
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

    return fused_residual_forward_kernel6


@fused_residual_forward.version(6, "a warp a row in registers, all its loads on the way at once")
def fused_residual_forward6(residual, out, mean, rstd, inp1, inp2, weight, bias, *, block_size=128, stream=0):
    """Rows that are not a multiple of 16 bytes, or have no room in a warp's registers, go the way of version 5."""
    N, C = inp1.shape
    arguments = residual, out, mean, rstd, inp1, inp2, weight, bias
    if C % 4 or C > 4096:
        fused_residual_forward5(*arguments, stream=stream)
        return
    make_fused_residual_forward_kernel6(C)[ceil_div(N, whole_warps(block_size)), block_size, stream](*arguments)


def fused_backward_inputs(rng, N, C):
    values = backward_inputs(rng, N, C)
    values["residual"], values["dresidual"] = values.pop("inp"), values.pop("dinp")
    return {**values, "dprojb": rng.standard_normal(C, dtype=np.float32)}


fused_residual_backward = Op(
    reference=cpu_reference.fused_residual_backward,
    inputs=fused_backward_inputs,
    outputs=lambda N, C: {},
    changed=("dresidual", "dweight", "dbias", "dprojb"),
    bytes_moved=lambda N, C: 4 * (4 * N * C + 2 * N + 7 * C),
    shape={"N": 8192, "C": 768},
    small={"N": 6, "C": 100},
    odd=[{"N": 3, "C": C} for C in (1, 3, 33, 100, 768, 1600, 1601)] + [{"N": 1, "C": 768}, {"N": 11, "C": 36}],
    trainer_shapes=[{"N": 4096, "C": 768}],
)


@cuda.jit(cache=True, fastmath=True)
def column_sums_kernel1(sums, values):
    N, C = values.shape
    c = cuda.grid(1)
    if c < C:
        total = float32(0)
        for row in range(N):
            total += values[row, c]
        sums[c] += total


@fused_residual_backward.version(1, "layernorm's version 5, then a kernel for the column sums, a thread a column")
def fused_residual_backward1(
    dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd, *, block_size=32, stream=0
):
    """dresidual, dout, residual: float32 (N, C); dweight, dbias, dprojb, weight: (C,); mean, rstd: (N,)."""
    layernorm_backward5(dresidual, dweight, dbias, dout, residual, weight, mean, rstd, stream=stream)
    column_sums_kernel1[ceil_div(dprojb.size, block_size), block_size, stream](dprojb, dresidual)


@fused_residual_backward.version(2, "the column sums in the same pass, layernorm's version 6")
def fused_residual_backward2(dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd, *, stream=0):
    """Rows that are not a multiple of 16 bytes, or longer than 8192, go the way of version 1."""
    C = residual.shape[1]
    if C % 4 or C > 8192:
        fused_residual_backward1(dresidual, dweight, dbias, dprojb, dout, residual, weight, mean, rstd, stream=stream)
        return
    launch_backward6(dresidual, (dweight, dbias, dprojb), dout, residual, weight, mean, rstd, stream)
