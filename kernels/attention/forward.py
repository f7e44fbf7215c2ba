"""Attention forward: out = softmax(q k^T / sqrt(hs)) v in each of NH heads, a query sees the keys up to its own.

q, k and v lie side by side in qkv (B,T,3C), as the matmul before wrote them. Beside out each row's log-sum-exp is kept:
with it the backward pass recomputes any probability. doc/attention.md tells the story.

version 1: a thread a score, a thread a row, a thread a number of out; the (T,T) scores lie in memory
version 2: flash attention as a lesson: scores never leave shared memory, but each multiply-add waits for two loads
version 3: batched matmuls in tiles on permuted heads, softmax a warp a row: memory traffic is all that it does
version 4: scale and mask inside a one-pass softmax, and nothing computed right of the diagonal: half of everything
version 5: flash in float32, 16 scores a thread in registers: 8 multiply-adds a 16-byte load
version 6: both products on the tensor cores, the next keys and values copied while these are used
version 7: twice the queries a warp, so half the loads a product; long rows first, so that no block is last with much to do
version 8: Hopper's wgmma: four warps together, which leave it to the tensor cores to read keys and values from shared memory
version 9: version 7, 16 queries a warp, with three products of TF32 for each: the digits of version 5 in less than half of its
           time
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.attention import tiles_fp32 as fp32
from kernels.attention import wgmma as hopper
from kernels.attention.matmul import TILE, batched_matmul, join_heads, split_heads
from kernels.attention.tiles import (
    LOG2E,
    MASKED,
    THREADS,
    add_columns_product,
    add_rows_product,
    any_head_size,
    clear,
    head_size,
    load_rows,
    mask_above,
    operand,
    quad_max,
    quad_sum,
    round_staged,
    stage,
    store_rows,
)
from kernels.device import (
    big_shared,
    ceil_div,
    cp_async_commit,
    cp_async_wait,
    cuda,
    exp2_approx,
    float32,
    int32,
    int64,
    keep_compiled,
    scratch,
)
from kernels.matmul.wgmma import fence_async, missing
from kernels.op import Op
from kernels.reduce import warp_max, warp_sum, whole_warps

ODD = [  # one query; head sizes that pad to 32 and 96, or that no tile has; more rows than a tile of 64
    {"B": B, "T": T, "NH": NH, "hs": hs}
    for B, T, NH, hs in ((2, 1, 1, 64), (1, 3, 2, 80), (1, 9, 1, 32), (1, 5, 1, 96), (1, 2, 1, 128), (1, 4, 2, 24), (1, 66, 1, 16))
]
LARGE = [{"B": 1, "T": 4096, "NH": 12, "hs": 64}]

def sizes_of(arguments: dict) -> dict:
    """The shape that the arguments have, forward or backward."""
    (B, T, C), NH = arguments["out"].shape, arguments["NH"]
    return {"B": B, "T": T, "NH": NH, "hs": C // NH}


attention_forward = Op(
    reference=cpu_reference.attention_forward,
    inputs=lambda rng, B, T, NH, hs: {"qkv": rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32), "NH": NH},
    outputs=lambda B, T, NH, hs: {"out": (B, T, NH * hs), "lse": (B, NH, T)},
    bytes_moved=lambda B, T, NH, hs: 4 * B * T * NH * (4 * hs + 1),
    flops=lambda B, T, NH, hs: 2 * B * NH * T * (T + 1) * hs,
    sizes=sizes_of,
    shape={"B": 4, "T": 1024, "NH": 12, "hs": 64},
    small={"B": 1, "T": 18, "NH": 1, "hs": 64},
    odd=ODD,
    large=LARGE,
)

LN2 = float32(math.log(2))


# Version 1 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def scores_kernel1(att, qkv, NH):
    """att (B*NH, T, T) = q.k / sqrt(hs), on the diagonal and left of it."""
    Z, T, _ = att.shape
    i = cuda.grid(1)
    if i < att.size:
        z, t, t2 = i // (T * T), i // T % T, i % T
        C = qkv.shape[2] // 3
        hs = C // NH
        if t2 <= t:
            x = float32(0)
            for c in range(z % NH * hs, (z % NH + 1) * hs):
                x += qkv[z // NH, t, c] * qkv[z // NH, t2, C + c]
            att[z, t, t2] = x / math.sqrt(float32(hs))


@cuda.jit(cache=True, fastmath=True)
def softmax_kernel1(att, lse):
    """In place, columns 0 to t of row t; lse (B*NH, T)."""
    i = cuda.grid(1)
    Z, T, _ = att.shape
    if i < Z * T:
        z, t = i // T, i % T
        top = MASKED
        for t2 in range(t + 1):
            top = max(top, att[z, t, t2])
        total = float32(0)
        for t2 in range(t + 1):
            att[z, t, t2] = math.exp(att[z, t, t2] - top)
            total += att[z, t, t2]
        for t2 in range(t + 1):
            att[z, t, t2] /= total
        lse[z, t] = top + math.log(total)


@cuda.jit(cache=True, fastmath=True)
def values_kernel1(out, att, qkv, NH):
    i = cuda.grid(1)
    _, T, C = out.shape
    if i < out.size:
        b, t, c = i // (T * C), i // C % T, i % C
        z = b * NH + c // (C // NH)
        x = float32(0)
        for t2 in range(t + 1):
            x += att[z, t, t2] * qkv[b, t2, 2 * C + c]
        out[b, t, c] = x


@attention_forward.version(1, "a thread a score, a thread a row of the softmax, a thread a number of out")
def attention_forward1(out, lse, qkv, NH, *, block_size=256, stream=0):
    """out (B,T,C), lse (B,NH,T), qkv (B,T,3C): float32, on the device; NH divides C. Scratch: B*NH*T*T floats."""
    B, T, C = out.shape
    any_head_size(C, NH)
    att = scratch("attention_scores", (B * NH, T, T))
    scores_kernel1[ceil_div(att.size, block_size), block_size, stream](att, qkv, NH)
    softmax_kernel1[ceil_div(B * NH * T, block_size), block_size, stream](att, lse.reshape(B * NH, T))
    values_kernel1[ceil_div(out.size, block_size), block_size, stream](out, att, qkv, NH)


# Version 2 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def flash_kernel2(out, lse, qkv, NH, hs):
    """A warp has 32 queries, one a lane, and walks over their keys, 32 a step."""
    smem = cuda.shared.array(0, float32)  # 32 rows each of q, k, v, o, then of exponentials; odd strides, for the banks
    stride = hs + 1
    _, T, C = out.shape
    lane, q0 = cuda.threadIdx.x, cuda.blockIdx.y * 32
    b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
    Q, K, V, O = lane * stride, 32 * stride, 64 * stride, (96 + lane) * stride
    P = 128 * stride + lane * 33
    t = q0 + lane
    for c in range(hs):
        smem[Q + c] = qkv[b, t, h * hs + c] / math.sqrt(float32(hs)) if t < T else float32(0)
        smem[O + c] = float32(0)
    top, total = MASKED, float32(0)
    for k0 in range(0, q0 + 1, 32):
        cuda.syncwarp()
        for row in range(32):
            for c in range(lane, hs, 32):
                inside = k0 + row < T
                smem[K + row * stride + c] = qkv[b, k0 + row, C + h * hs + c] if inside else float32(0)
                smem[V + row * stride + c] = qkv[b, k0 + row, 2 * C + h * hs + c] if inside else float32(0)
        cuda.syncwarp()
        keys = min(32, t - k0 + 1)
        new = top
        for j in range(keys):
            x = float32(0)
            for c in range(hs):
                x += smem[Q + c] * smem[K + j * stride + c]
            smem[P + j] = x
            new = max(new, x)
        shrink = math.exp(top - new)
        total *= shrink
        for j in range(keys):
            smem[P + j] = math.exp(smem[P + j] - new)
            total += smem[P + j]
        for c in range(hs):
            x = smem[O + c] * shrink
            for j in range(keys):
                x += smem[P + j] * smem[V + j * stride + c]
            smem[O + c] = x
        top = new
    if t < T:
        for c in range(hs):
            out[b, t, h * hs + c] = smem[O + c] / total
        lse[b, h, t] = top + math.log(total)


@attention_forward.version(2, "flash, a thread a query: no (T,T) array, but every number comes from shared memory")
def attention_forward2(out, lse, qkv, NH, *, stream=0):
    """As attention_forward1, without scratch."""
    B, T, C = out.shape
    hs = any_head_size(C, NH)
    nbytes = 4 * (128 * (hs + 1) + 32 * 33)
    big_shared(flash_kernel2, (B * NH, ceil_div(T, 32)), 32, stream, nbytes)(out, lse, qkv, NH, hs)


# Version 3 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def scale_kernel3(att, scale):
    i = cuda.grid(1)
    T = att.shape[1]
    if i < att.size:
        z, t, t2 = i // (T * T), i // T % T, i % T
        att[z, t, t2] = att[z, t, t2] * scale if t2 <= t else MASKED


@cuda.jit(cache=True, fastmath=True)
def softmax_kernel3(att, lse):
    """In place, a warp a row, in three passes over all of it."""
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    Z, T, _ = att.shape
    if row < Z * T:
        z, t = row // T, row % T
        top = MASKED
        for t2 in range(lane, T, 32):
            top = max(top, att[z, t, t2])
        top = warp_max(top)
        total = float32(0)
        for t2 in range(lane, T, 32):
            att[z, t, t2] = math.exp(att[z, t, t2] - top)
            total += att[z, t, t2]
        total = warp_sum(total)
        for t2 in range(lane, T, 32):
            att[z, t, t2] /= total
        if lane == 0:
            lse[z, t] = top + math.log(total)


@attention_forward.version(3, "permute, batched matmul, scale and mask, softmax, batched matmul, permute")
def attention_forward3(out, lse, qkv, NH, *, block_size=256, stream=0):
    """As attention_forward1. Scratch: B*NH*T*T + 4*B*T*C floats."""
    B, T, C = out.shape
    hs, blocks = any_head_size(C, NH), ceil_div(B * NH * T, whole_warps(block_size))
    q, k, v = split_qkv(B, T, NH, hs, qkv, stream)
    att, values = scratch("attention_scores", (B * NH, T, T)), scratch("attention_values", (B * NH, T, hs))
    batched_matmul(att, q, k, stream, trans_b=True)
    scale_kernel3[ceil_div(att.size, block_size), block_size, stream](att, float32(1 / math.sqrt(hs)))
    softmax_kernel3[blocks, block_size, stream](att, lse.reshape(B * NH, T))
    batched_matmul(values, att, v, stream)
    join_heads(out, values, NH, 0, stream)


def split_qkv(B, T, NH, hs, qkv, stream):
    """q, k and v, each (B*NH, T, hs), in scratch memory."""
    heads = [scratch(f"attention_{name}", (B * NH, T, hs)) for name in "qkv"]
    for p, head in enumerate(heads):
        split_heads(head, qkv, NH, p, stream)
    return heads


# Version 4 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def softmax_kernel4(att, lse, scale):
    """In place, a warp a row: softmax of scale * att over columns 0 to t, zeros to the end of the diagonal's tile of 64.

    One pass finds maximum and sum together: a lane's sum is scaled down whenever it meets a new maximum.
    """
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    Z, T, _ = att.shape
    if row < Z * T:
        z, t = row // T, row % T
        top, total = MASKED, float32(0)
        for t2 in range(lane, t + 1, 32):
            x = scale * att[z, t, t2]
            new = max(top, x)
            total = total * math.exp(top - new) + math.exp(x - new)
            top = new
        new = warp_max(top)
        total = warp_sum(total * math.exp(top - new))
        for t2 in range(lane, min(T, (t // TILE + 1) * TILE), 32):
            att[z, t, t2] = math.exp(scale * att[z, t, t2] - new) / total if t2 <= t else float32(0)
        if lane == 0:
            lse[z, t] = new + math.log(total)


@attention_forward.version(4, "scale and mask inside an online softmax; the masked half is skipped everywhere")
def attention_forward4(out, lse, qkv, NH, *, block_size=256, stream=0):
    """As attention_forward3."""
    B, T, C = out.shape
    hs, blocks = any_head_size(C, NH), ceil_div(B * NH * T, whole_warps(block_size))
    q, k, v = split_qkv(B, T, NH, hs, qkv, stream)
    att, values = scratch("attention_scores", (B * NH, T, T)), scratch("attention_values", (B * NH, T, hs))
    batched_matmul(att, q, k, stream, trans_b=True, triangle="out")
    scale = float32(1 / math.sqrt(hs))
    softmax_kernel4[blocks, block_size, stream](att, lse.reshape(B * NH, T), scale)
    batched_matmul(values, att, v, stream, triangle="below")
    join_heads(out, values, NH, 0, stream)


# Version 5 ------------------------------------------------------------------------------------------------------------


@functools.cache
def flash_fp32(hs):
    """The kernel for a head size: 64 queries a block, 64 keys a step, 4 x 4 scores a thread."""
    HEAD, WIDTH, SCALE = fp32.ROWS * (hs + 4), 4 * ceil_div(hs, 64), float32(1 / math.sqrt(hs))
    K, V, P = HEAD, 2 * HEAD, 3 * HEAD

    @cuda.jit(cache=True, fastmath=True)
    def flash_fp32_kernel(out, lse, qkv, NH):
        smem = cuda.shared.array(0, float32)  # tiles of q, k and v, then the exponentials
        ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
        _, T, C = out.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        q0 = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * 64
        first = b * T * 3 * C + h * hs
        s, o = cuda.local.array((4, 4), float32), cuda.local.array((4, WIDTH), float32)
        top, total = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for i in range(4):
            top[i], total[i] = MASKED, float32(0)
            for c in range(WIDTH):
                o[i, c] = float32(0)
        fp32.load_tile(smem, 0, qkv, first + q0 * 3 * C, 3 * C, T - q0, hs)
        for k0 in range(0, q0 + 1, 64):
            cuda.syncthreads()
            fp32.load_tile(smem, K, qkv, first + C + k0 * 3 * C, 3 * C, T - k0, hs)
            fp32.load_tile(smem, V, qkv, first + 2 * C + k0 * 3 * C, 3 * C, T - k0, hs)
            cuda.syncthreads()
            fp32.rows_product(s, smem, 0, K, hs, T - q0)
            for i in range(4):
                new = top[i]
                for j in range(4):
                    s[i, j] = s[i, j] * SCALE if k0 + tx + 16 * j <= q0 + 4 * ty + i else MASKED
                    new = max(new, s[i, j])
                new = fp32.row_max(new)
                shrink = math.exp(top[i] - new)
                top[i] = new
                total[i] *= shrink
                for j in range(4):
                    s[i, j] = math.exp(s[i, j] - new)
                    total[i] += s[i, j]
                for c in range(WIDTH):
                    o[i, c] *= shrink
            fp32.lay_down(s, smem, P)
            fp32.columns_product(o, smem, P, V, hs, T - q0)
        for i in range(4):
            x = fp32.row_sum(total[i])
            total[i] = float32(1) / x
            if tx == 0 and q0 + 4 * ty + i < T:
                lse[b, h, q0 + 4 * ty + i] = top[i] + math.log(x)
        fp32.store_tile(out, b * T * C + h * hs + q0 * C, C, T - q0, hs, o, total)

    return flash_fp32_kernel


@attention_forward.version(5, "flash, tiles of 64 x 64 scores, 4 x 4 a thread in registers")
def attention_forward5(out, lse, qkv, NH, *, stream=0):
    """As attention_forward1, without scratch; C / NH one of HEAD_SIZES. So in every version from here on."""
    B, T, C = out.shape
    hs = head_size(C, NH)
    nbytes = 4 * (3 * fp32.ROWS * (hs + 4) + fp32.SCORES)
    big_shared(flash_fp32(hs), (B * NH, ceil_div(T, 64)), fp32.THREADS, stream, nbytes)(out, lse, qkv, NH)


# Versions 6 and 7 -----------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def online_softmax(s, o, top, total, tf32):
    """Scores s, in units of ln 2, become exponentials over the maximum so far, rounded; what o and total hold is scaled to it."""
    for m in range(s.shape[0]):
        for r in range(2):
            x = top[m, r]
            for n in range(s.shape[1]):
                x = max(x, max(s[m, n, 2 * r], s[m, n, 2 * r + 1]))
            x = quad_max(x)
            shrink = exp2_approx(top[m, r] - x)
            top[m, r] = x
            y = total[m, r] * shrink  # this lane's keys alone: the sum over the quad waits until the end
            for n in range(s.shape[1]):
                for i in range(2):
                    p = exp2_approx(s[m, n, 2 * r + i] - x)
                    y += p
                    s[m, n, 2 * r + i] = operand(p, tf32)
            total[m, r] = y
            for n in range(o.shape[1]):
                o[m, n, 2 * r] *= shrink
                o[m, n, 2 * r + 1] *= shrink


@functools.cache
def flash_tf32(hs, M, KEYS, heavy_first, blocks, TF32):
    """The kernel for a head size: 16 M queries a warp, KEYS keys a step. TF32: how many products make one."""
    HS = 32 * ceil_div(hs, 32)
    K, N, QUERIES, TILE = HS // 8, KEYS // 8, 64 * M, KEYS * HS
    SCALE = float32(LOG2E / math.sqrt(hs))

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS, blocks))
    def flash_tf32_kernel(out, lse, qkv, NH):
        smem = cuda.shared.array(0, float32)  # two tiles of keys, two of values
        lane = cuda.threadIdx.x & 31
        g, t = lane >> 2, lane & 3
        _, T, C = out.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        block = cuda.gridDim.y - 1 - cuda.blockIdx.y if heavy_first else cuda.blockIdx.y
        row0 = block * QUERIES + (cuda.threadIdx.x >> 5) * (16 * M)
        first = b * T * 3 * C + h * hs
        stage(smem, 0, HS, KEYS, qkv, first + C, 3 * C, T, hs)
        stage(smem, 2 * TILE, HS, KEYS, qkv, first + 2 * C, 3 * C, T, hs)
        cp_async_commit()
        q = cuda.local.array((M, K, 4), float32)
        s = cuda.local.array((M, N, 4), float32)
        o = cuda.local.array((M, K, 4), float32)
        top, total = cuda.local.array((M, 2), float32), cuda.local.array((M, 2), float32)
        load_rows(q, qkv, first, 3 * C, row0, T, hs, SCALE, TF32)
        clear(o)
        for m in range(M):
            for r in range(2):
                top[m, r] = MASKED
                total[m, r] = float32(0)
        steps = (min(block * QUERIES + QUERIES, T) + KEYS - 1) // KEYS
        for step in range(steps):
            now = (step & 1) * TILE
            cp_async_wait(0)
            if TF32 == 1:
                round_staged(smem, now, HS, KEYS)
                round_staged(smem, 2 * TILE + now, HS, KEYS)
            cuda.syncthreads()
            key0 = (step + 1) * KEYS
            if step + 1 < steps:
                stage(smem, TILE - now, HS, KEYS, qkv, first + C + key0 * 3 * C, 3 * C, T - key0, hs)
                stage(smem, 3 * TILE - now, HS, KEYS, qkv, first + 2 * C + key0 * 3 * C, 3 * C, T - key0, hs)
                cp_async_commit()
            key0 = step * KEYS
            if key0 < row0 + 16 * M:  # else every key of the step is right of the warp's rows
                clear(s)
                add_rows_product(s, q, smem, now, HS, TF32)
                if key0 + KEYS > row0:
                    mask_above(s, row0 - key0)
                online_softmax(s, o, top, total, TF32)
                add_columns_product(o, s, smem, 2 * TILE + now, HS, TF32)
        for m in range(M):
            for r in range(2):
                y = quad_sum(total[m, r])
                row = row0 + 16 * m + 8 * r + g
                total[m, r] = float32(1) / y
                if t == 0 and row < T:
                    lse[b, h, row] = top[m, r] * LN2 + math.log(y)
        store_rows(out, b * T * C + h * hs, C, row0, T, hs, o, total)

    return flash_tf32_kernel


def launch_flash_tf32(out, lse, qkv, NH, M, KEYS, heavy_first, blocks, stream, tf32=1):
    B, T, C = out.shape
    hs = head_size(C, NH)
    kernel = flash_tf32(hs, M, KEYS, heavy_first, blocks, tf32)
    grid = (B * NH, ceil_div(T, 64 * M))
    nbytes = 4 * 4 * KEYS * 32 * ceil_div(hs, 32)
    big_shared(kernel, grid, THREADS, stream, nbytes)(out, lse, qkv, NH)


@attention_forward.version(6, "flash on the tensor cores (TF32), keys and values copied ahead", precision="tf32", needs_cc=(8, 0))
def attention_forward6(out, lse, qkv, NH, *, stream=0):
    """As attention_forward1, without scratch."""
    launch_flash_tf32(out, lse, qkv, NH, 1, 32, False, 3, stream)


@attention_forward.version(7, "32 queries a warp, long rows first", precision="tf32", needs_cc=(8, 0))
def attention_forward7(out, lse, qkv, NH, *, stream=0):
    """As attention_forward6."""
    if out.shape[2] // NH <= 64:
        launch_flash_tf32(out, lse, qkv, NH, 2, 64, True, 2, stream)
    else:
        launch_flash_tf32(out, lse, qkv, NH, 1, 32, True, 2, stream)


# Version 8 ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def online_softmax8(s, o, top, total, scale):
    """online_softmax of a warp group's accumulators, times the scale."""
    for r in range(2):
        x = MASKED
        for j in range(2 * r, 32, 4):
            x = max(x, max(s[j], s[j + 1]))
        x = max(top[r], quad_max(x) * scale)
        shrink = exp2_approx(top[r] - x)
        top[r] = x
        y = total[r] * shrink
        for j in range(2 * r, 32, 4):
            p0, p1 = exp2_approx(s[j] * scale - x), exp2_approx(s[j + 1] * scale - x)
            y += p0 + p1
            s[j], s[j + 1] = hopper.round_finite(p0), hopper.round_finite(p1)
            o[j] *= shrink
            o[j + 1] *= shrink
        total[r] = y


@functools.cache
def flash_wgmma():
    """The kernel for heads of 64 channels: 128 queries a block, 64 a warp group, 64 keys a step."""
    SCALE, TILE = float32(LOG2E / math.sqrt(64) * hopper.MADE_UP**2), hopper.TILE  # queries and keys are cut off
    VALUE, QUERY = 4 * TILE, 5 * TILE

    @cuda.jit(device=True)
    def copy(smem, stage, qkv, first, stride, key0, T):
        hopper.copy_block(smem, stage, qkv, first, stride, key0, T)
        hopper.copy_block(smem, VALUE, qkv, first + stride // 3, stride, key0, T)
        cp_async_commit()

    @cuda.jit(device=True)
    def arrive(smem, stage):
        cp_async_wait(0)
        hopper.turn_block(smem, VALUE, stage + TILE)
        fence_async()

    @cuda.jit(fastmath=True, launch_bounds=(hopper.THREADS, 2))
    def flash_wgmma_kernel(out, lse, qkv, NH):
        # twice a tile of keys and one of values, transposed; values on their way; the block's queries
        smem = cuda.shared.array(0, float32, alignment=1024)
        _, T, C = out.shape
        T, stride = int32(T), int32(3 * C)
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        query0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * hopper.ROWS)
        row, keys = int32(query0 + hopper.group_row()), min(int32(query0 + hopper.ROWS), T)
        end = int32(query0 + hopper.GROUP_ROWS * (hopper.group_number() + 1))  # of the keys that the group sees
        first = int64(b) * T * 3 * C + C + 64 * h
        s, o = cuda.local.array(32, float32), cuda.local.array(32, float32)
        top, total = cuda.local.array(2, float32), cuda.local.array(2, float32)
        hopper.copy_rows(smem, QUERY, qkv, first - C, stride, query0, T)
        copy(smem, 0, qkv, first, stride, int32(0), T)
        hopper.clear(o)
        for r in range(2):
            top[r] = MASKED
            total[r] = float32(0)
        arrive(smem, 0)
        cuda.syncthreads()
        key0, now, next = int32(0), int32(0), int32(2 * TILE)
        while True:
            next0 = int32(key0 + hopper.STEP)
            if next0 < keys:
                copy(smem, next, qkv, first, stride, next0, T)
            hopper.tiles_product(s, smem, QUERY + hopper.group_number() * TILE, now)
            hopper.wgmma_finish(s)
            if next0 >= end:
                hopper.mask_above(s, row - key0)
            online_softmax8(s, o, top, total, SCALE)
            hopper.add_columns_product(o, s, smem, now + TILE)
            if next0 >= keys:
                break
            arrive(smem, next)
            hopper.wgmma_finish(o)
            cuda.syncthreads()
            if next0 >= end:  # the last step is the other group's alone
                break
            key0, now, next = next0, next, now
        hopper.wgmma_finish(o)
        for r in range(2):
            y = quad_sum(total[r])
            total[r] = float32(1) / y
            if cuda.threadIdx.x & 3 == 0 and row + 8 * r < T:
                lse[b, h, row + 8 * r] = top[r] * LN2 + math.log(y)
        hopper.store_rows(out, int64(b) * T * C + 64 * h, C, row, T, o, total[0], total[1])

    return keep_compiled(flash_wgmma_kernel)


@attention_forward.version(
    8, "wgmma: 64 queries a warp group, the keys cut off", precision="tf32", needs_cc=(9, 0), needs=missing
)
def attention_forward8(out, lse, qkv, NH, *, stream=0):
    """As attention_forward6, for heads of 64 channels."""
    B, T, C = out.shape
    hopper.check_head_size(head_size(C, NH))
    grid, nbytes = (B * NH, ceil_div(T, hopper.ROWS)), 4 * 7 * hopper.TILE
    big_shared(flash_wgmma(), grid, hopper.THREADS, stream, nbytes)(out, lse, qkv, NH)


# Version 9 ------------------------------------------------------------------------------------------------------------


@attention_forward.version(
    9, "flash on the tensor cores, three products of TF32 for each", precision="3xtf32", needs_cc=(8, 0)
)
def attention_forward9(out, lse, qkv, NH, *, stream=0):
    """As attention_forward6."""
    launch_flash_tf32(out, lse, qkv, NH, 1, 64 if out.shape[2] // NH <= 64 else 32, True, 2, stream, tf32=3)
