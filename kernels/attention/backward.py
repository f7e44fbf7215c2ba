"""Attention backward: dqkv from dout and what the forward read and wrote. In each head, with s = q k^T / sqrt(hs):

    p = exp(s - lse)    dv = p^T dout    dp = dout v^T    ds = p * (dp - delta)    dq = ds k / sqrt(hs)    dk = ds^T q / sqrt(hs)

where delta, a number a row, is the sum of p * dp over the row, and equals dout.out (doc/attention.md derives all this).

version 1: a thread a query, then a thread a key, each walking over what it sees; every sum lives in memory
version 2: a warp a query or key, a few channels a lane: neighbouring loads, and sums in registers
version 3: batched matmuls in tiles, with p and ds whole in memory, as llm.c does
version 4: the same, but nothing is computed right of the diagonal, and delta comes from dout.out
version 5: flash in float32: p and ds recomputed tile by tile, once for dq and once for dk and dv
version 6: flash on the tensor cores, everything from one look at each tile; dq is summed up by atomics, in any order
version 7: flash on the tensor cores in two kernels, one that owns queries and one that owns keys: no atomics, the same bits
           each run, and no slower: what the atomics cost pays for computing s and dp twice
version 8: Hopper's wgmma: the products run on while a warp group turns what came before into probabilities and gradients
version 9: version 7, 16 rows a warp, with three products of TF32 for each: the digits of version 5 in less than half of its time
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels.attention import tiles_fp32 as fp32
from kernels.attention import wgmma as hopper
from kernels.attention.forward import LARGE, ODD, sizes_of, split_qkv
from kernels.attention.matmul import TILE, batched_matmul, join_heads, split_heads
from kernels.attention.tiles import (
    LOG2E,
    THREADS,
    add_columns_product,
    add_rows_product,
    add_rows_product_kept,
    any_head_size,
    clear,
    head_size,
    keep_rows,
    load_rows,
    mask_above,
    mask_below,
    mma,
    operand,
    quad_sum,
    round_staged,
    stage,
    store_rows,
    swizzle,
)
from kernels.device import (
    atomic_add4,
    big_shared,
    ceil_div,
    cp_async16,
    cp_async_commit,
    cp_async_wait,
    cuda,
    exp2_approx,
    float32,
    int32,
    int64,
    keep_compiled,
    load2,
    load4,
    need,
    scratch,
    store2,
)
from kernels.matmul.wgmma import fence_async, missing
from kernels.op import Op
from kernels.reduce import warp_sum, warp_sum2, whole_warps


def backward_inputs(rng, B, T, NH, hs):
    """dout and qkv, and what the forward makes of qkv."""
    dout = rng.standard_normal((B, T, NH * hs), dtype=np.float32)
    qkv = rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32)
    out, lse = np.empty((B, T, NH * hs)), np.empty((B, NH, T))
    cpu_reference.attention_forward(out, lse, qkv.astype(np.float64), NH)
    return {"dout": dout, "qkv": qkv, "out": out.astype(np.float32), "lse": lse.astype(np.float32), "NH": NH}


attention_backward = Op(
    reference=cpu_reference.attention_backward,
    inputs=backward_inputs,
    outputs=lambda B, T, NH, hs: {"dqkv": (B, T, 3 * NH * hs)},
    bytes_moved=lambda B, T, NH, hs: 4 * B * T * NH * (8 * hs + 1),
    flops=lambda B, T, NH, hs: 5 * B * NH * T * (T + 1) * hs,
    sizes=sizes_of,
    shape={"B": 4, "T": 1024, "NH": 12, "hs": 64},
    small={"B": 1, "T": 18, "NH": 1, "hs": 64},
    odd=ODD,
    large=LARGE,
)

SEES_NOTHING = float32(1e30)  # a log-sum-exp so large that every probability of the row is zero


# Version 1 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def dq_kernel1(dqkv, dout, qkv, out, lse, NH):
    """A thread a query."""
    i = cuda.grid(1)
    B, T, C = out.shape
    if i < B * NH * T:
        b, h, t = i // (NH * T), i // T % NH, i % T
        hs = C // NH
        scale = float32(1) / math.sqrt(float32(hs))
        delta = float32(0)
        for c in range(h * hs, (h + 1) * hs):
            dqkv[b, t, c] = float32(0)
            delta += dout[b, t, c] * out[b, t, c]
        for t2 in range(t + 1):
            s, dp = float32(0), float32(0)
            for c in range(h * hs, (h + 1) * hs):
                s += qkv[b, t, c] * qkv[b, t2, C + c]
                dp += dout[b, t, c] * qkv[b, t2, 2 * C + c]
            ds = math.exp(s * scale - lse[b, h, t]) * (dp - delta) * scale
            for c in range(h * hs, (h + 1) * hs):
                dqkv[b, t, c] += ds * qkv[b, t2, C + c]


@cuda.jit(cache=True, fastmath=True)
def dkv_kernel1(dqkv, dout, qkv, out, lse, NH):
    """A thread a key."""
    i = cuda.grid(1)
    B, T, C = out.shape
    if i < B * NH * T:
        b, h, t2 = i // (NH * T), i // T % NH, i % T
        hs = C // NH
        scale = float32(1) / math.sqrt(float32(hs))
        for c in range(h * hs, (h + 1) * hs):
            dqkv[b, t2, C + c] = float32(0)
            dqkv[b, t2, 2 * C + c] = float32(0)
        for t in range(t2, T):
            s, dp = float32(0), float32(0)
            for c in range(h * hs, (h + 1) * hs):
                s += qkv[b, t, c] * qkv[b, t2, C + c]
                dp += dout[b, t, c] * (qkv[b, t2, 2 * C + c] - out[b, t, c])  # the row's delta with it
            p = math.exp(s * scale - lse[b, h, t])
            for c in range(h * hs, (h + 1) * hs):
                dqkv[b, t2, C + c] += p * dp * scale * qkv[b, t, c]
                dqkv[b, t2, 2 * C + c] += p * dout[b, t, c]


@attention_backward.version(1, "a thread a query, then a thread a key")
def attention_backward1(dqkv, dout, qkv, out, lse, NH, *, block_size=128, stream=0):
    """dqkv, qkv (B,T,3C); dout, out (B,T,C); lse (B,NH,T): float32, on the device; NH divides C."""
    B, T, C = out.shape
    any_head_size(C, NH)
    blocks = ceil_div(B * NH * T, block_size)
    dq_kernel1[blocks, block_size, stream](dqkv, dout, qkv, out, lse, NH)
    dkv_kernel1[blocks, block_size, stream](dqkv, dout, qkv, out, lse, NH)


# Version 2 ------------------------------------------------------------------------------------------------------------

LANE = 4  # channels a lane at most, 32 apart


@cuda.jit(device=True, cache=True)
def load_channels(x, array, b, t, first, hs):
    """x[i] = channel 32 i + lane of the head whose first channel is `first`."""
    for i in range(LANE):
        c = (cuda.threadIdx.x & 31) + 32 * i
        x[i] = array[b, t, first + c] if c < hs else float32(0)


@cuda.jit(device=True, cache=True)
def store_channels(array, b, t, first, hs, x):
    for i in range(LANE):
        c = (cuda.threadIdx.x & 31) + 32 * i
        if c < hs:
            array[b, t, first + c] = x[i]


@cuda.jit(device=True, cache=True)
def two_products(a, b, c, d):
    """The dot products a.b and c.d over the head, in every lane."""
    x, y = float32(0), float32(0)
    for i in range(LANE):
        x += a[i] * b[i]
        y += c[i] * d[i]
    return warp_sum2(x, y)


@cuda.jit(cache=True, fastmath=True)
def dq_kernel2(dqkv, delta, dout, qkv, out, lse, NH):
    """A warp a query; delta (B,NH,T) is kept for dkv_kernel2."""
    row = cuda.grid(1) >> 5
    B, T, C = out.shape
    if row < B * NH * T:
        b, h, t = row // (NH * T), row // T % NH, row % T
        hs = C // NH
        scale = float32(1) / math.sqrt(float32(hs))
        q, do, dq = cuda.local.array(LANE, float32), cuda.local.array(LANE, float32), cuda.local.array(LANE, float32)
        k, v = cuda.local.array(LANE, float32), cuda.local.array(LANE, float32)
        load_channels(q, qkv, b, t, h * hs, hs)
        load_channels(do, dout, b, t, h * hs, hs)
        load_channels(v, out, b, t, h * hs, hs)
        d, _ = two_products(do, v, do, v)
        for i in range(LANE):
            dq[i] = float32(0)
        for t2 in range(t + 1):
            load_channels(k, qkv, b, t2, C + h * hs, hs)
            load_channels(v, qkv, b, t2, 2 * C + h * hs, hs)
            s, dp = two_products(q, k, do, v)
            ds = math.exp(s * scale - lse[b, h, t]) * (dp - d) * scale
            for i in range(LANE):
                dq[i] += ds * k[i]
        store_channels(dqkv, b, t, h * hs, hs, dq)
        if cuda.threadIdx.x & 31 == 0:
            delta[b, h, t] = d


@cuda.jit(cache=True, fastmath=True)
def dkv_kernel2(dqkv, delta, dout, qkv, lse, NH):
    """A warp a key."""
    row = cuda.grid(1) >> 5
    B, T, C = dout.shape
    if row < B * NH * T:
        b, h, t2 = row // (NH * T), row // T % NH, row % T
        hs = C // NH
        scale = float32(1) / math.sqrt(float32(hs))
        k, v, q, do = (
            cuda.local.array(LANE, float32), cuda.local.array(LANE, float32), cuda.local.array(LANE, float32),
            cuda.local.array(LANE, float32),
        )  # fmt: skip
        dk, dv = cuda.local.array(LANE, float32), cuda.local.array(LANE, float32)
        load_channels(k, qkv, b, t2, C + h * hs, hs)
        load_channels(v, qkv, b, t2, 2 * C + h * hs, hs)
        for i in range(LANE):
            dk[i], dv[i] = float32(0), float32(0)
        for t in range(t2, T):
            load_channels(q, qkv, b, t, h * hs, hs)
            load_channels(do, dout, b, t, h * hs, hs)
            s, dp = two_products(q, k, do, v)
            p = math.exp(s * scale - lse[b, h, t])
            ds = p * (dp - delta[b, h, t]) * scale
            for i in range(LANE):
                dk[i] += ds * q[i]
                dv[i] += p * do[i]
        store_channels(dqkv, b, t2, C + h * hs, hs, dk)
        store_channels(dqkv, b, t2, 2 * C + h * hs, hs, dv)


@attention_backward.version(2, "a warp a query, then a warp a key")
def attention_backward2(dqkv, dout, qkv, out, lse, NH, *, block_size=128, stream=0):
    """As attention_backward1."""
    B, T, C = out.shape
    hs = any_head_size(C, NH)
    need(hs <= 32 * LANE, f"needs heads of at most {32 * LANE} channels, which a warp holds in registers, got {hs}")
    delta = scratch("attention_delta", (B, NH, T))
    blocks = ceil_div(B * NH * T, whole_warps(block_size))
    dq_kernel2[blocks, block_size, stream](dqkv, delta, dout, qkv, out, lse, NH)
    dkv_kernel2[blocks, block_size, stream](dqkv, delta, dout, qkv, lse, NH)


# Versions 3 and 4 -----------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def probabilities_kernel3(att, lse, scale):
    """In place, a thread a score: exp(scale * att - lse), zeros right of the diagonal. att (B*NH,T,T), lse (B*NH,T)."""
    i = cuda.grid(1)
    T = att.shape[1]
    if i < att.size:
        z, t, t2 = i // (T * T), i // T % T, i % T
        att[z, t, t2] = math.exp(scale * att[z, t, t2] - lse[z, t]) if t2 <= t else float32(0)


@cuda.jit(cache=True, fastmath=True)
def softmax_backward_kernel3(datt, att, scale):
    """In place, a warp a row: datt = att * (datt - delta) * scale, delta the sum of att * datt over the row."""
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    Z, T, _ = att.shape
    if row < Z * T:
        z, t = row // T, row % T
        delta = float32(0)
        for t2 in range(lane, T, 32):
            delta += att[z, t, t2] * datt[z, t, t2]
        delta = warp_sum(delta)
        for t2 in range(lane, T, 32):
            datt[z, t, t2] = att[z, t, t2] * (datt[z, t, t2] - delta) * scale


@attention_backward.version(3, "permute, five batched matmuls, softmax backward, permute")
def attention_backward3(dqkv, dout, qkv, out, lse, NH, *, block_size=256, stream=0):
    """As attention_backward1. Scratch: 2*B*NH*T*T + 5*B*T*C floats."""
    B, T, C = out.shape
    hs, blocks = any_head_size(C, NH), ceil_div(B * NH * T, whole_warps(block_size))
    scale = float32(1 / math.sqrt(hs))
    q, k, v = split_qkv(B, T, NH, hs, qkv, stream)
    do, dhead = scratch("attention_values", (B * NH, T, hs)), scratch("attention_dhead", (B * NH, T, hs))
    split_heads(do, dout, NH, 0, stream)
    att, datt = scratch("attention_scores", (B * NH, T, T)), scratch("attention_dscores", (B * NH, T, T))
    batched_matmul(att, q, k, stream, trans_b=True)
    probabilities_kernel3[ceil_div(att.size, block_size), block_size, stream](att, lse.reshape(B * NH, T), scale)
    batched_matmul(dhead, att, do, stream, trans_a=True)
    join_heads(dqkv, dhead, NH, 2, stream)
    batched_matmul(datt, do, v, stream, trans_b=True)
    softmax_backward_kernel3[blocks, block_size, stream](datt, att, scale)
    batched_matmul(dhead, datt, k, stream)
    join_heads(dqkv, dhead, NH, 0, stream)
    batched_matmul(dhead, datt, q, stream, trans_a=True)
    join_heads(dqkv, dhead, NH, 1, stream)


@cuda.jit(cache=True, fastmath=True)
def softmax_backward_kernel4(datt, att, do, o, lse, scale):
    """In place, a warp a row, columns up to the end of the diagonal's tile of 64: att = exp(scale * att - lse),
    datt = att * (datt - delta) * scale, delta = do.o; both zero right of the diagonal."""
    lane, row = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    Z, T, hs = do.shape
    if row < Z * T:
        z, t = row // T, row % T
        delta = float32(0)
        for c in range(lane, hs, 32):
            delta += do[z, t, c] * o[z, t, c]
        delta = warp_sum(delta)
        for t2 in range(lane, min(T, (t // TILE + 1) * TILE), 32):
            p = math.exp(scale * att[z, t, t2] - lse[z, t]) if t2 <= t else float32(0)
            att[z, t, t2] = p
            datt[z, t, t2] = p * (datt[z, t, t2] - delta) * scale if t2 <= t else float32(0)


@attention_backward.version(4, "nothing right of the diagonal, one pass over the scores")
def attention_backward4(dqkv, dout, qkv, out, lse, NH, *, block_size=256, stream=0):
    """As attention_backward3."""
    B, T, C = out.shape
    hs, blocks = any_head_size(C, NH), ceil_div(B * NH * T, whole_warps(block_size))
    scale = float32(1 / math.sqrt(hs))
    q, k, v = split_qkv(B, T, NH, hs, qkv, stream)
    do, dhead = scratch("attention_values", (B * NH, T, hs)), scratch("attention_dhead", (B * NH, T, hs))
    split_heads(do, dout, NH, 0, stream)
    split_heads(dhead, out, NH, 0, stream)
    att, datt = scratch("attention_scores", (B * NH, T, T)), scratch("attention_dscores", (B * NH, T, T))
    batched_matmul(att, q, k, stream, trans_b=True, triangle="out")
    batched_matmul(datt, do, v, stream, trans_b=True, triangle="out")
    softmax_backward_kernel4[blocks, block_size, stream](datt, att, do, dhead, lse.reshape(B * NH, T), scale)
    batched_matmul(dhead, att, do, stream, trans_a=True, triangle="above")
    join_heads(dqkv, dhead, NH, 2, stream)
    batched_matmul(dhead, datt, k, stream, triangle="below")
    join_heads(dqkv, dhead, NH, 0, stream)
    batched_matmul(dhead, datt, q, stream, trans_a=True, triangle="above")
    join_heads(dqkv, dhead, NH, 1, stream)


# Version 5 ------------------------------------------------------------------------------------------------------------


@functools.cache
def flash_fp32_dq(hs):
    """The kernel that owns 64 queries a block and walks over their keys, 64 a step."""
    HEAD, WIDTH, SCALE = fp32.ROWS * (hs + 4), 4 * ceil_div(hs, 64), float32(1 / math.sqrt(hs))
    DO, K, V, P = HEAD, 2 * HEAD, 3 * HEAD, 4 * HEAD

    @cuda.jit(cache=True, fastmath=True)
    def flash_fp32_dq_kernel(dqkv, stats, dout, qkv, out, lse, NH):
        smem = cuda.shared.array(0, float32)  # tiles of q, dout, k, v, then ds
        ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
        _, T, C = out.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        q0 = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * 64
        first, first_out = b * T * 3 * C + h * hs, b * T * C + h * hs
        s, ds, dq = cuda.local.array((4, 4), float32), cuda.local.array((4, 4), float32), cuda.local.array((4, WIDTH), float32)
        lses, delta = cuda.local.array(4, float32), cuda.local.array(4, float32)
        fp32.load_tile(smem, 0, qkv, first + q0 * 3 * C, 3 * C, T - q0, hs)
        fp32.load_tile(smem, DO, dout, first_out + q0 * C, C, T - q0, hs)
        for i in range(4):
            t, x = q0 + 4 * ty + i, float32(0)
            for c in range(tx, hs if t < T else 0, 16):
                x += dout[b, t, h * hs + c] * out[b, t, h * hs + c]
            delta[i] = fp32.row_sum(x)
            lses[i] = lse[b, h, t] if t < T else SEES_NOTHING
            if tx == 0:
                stats[cuda.blockIdx.x, t, 0], stats[cuda.blockIdx.x, t, 1] = lses[i], delta[i]
            for c in range(WIDTH):
                dq[i, c] = float32(0)
        for k0 in range(0, q0 + 1, 64):
            cuda.syncthreads()
            fp32.load_tile(smem, K, qkv, first + C + k0 * 3 * C, 3 * C, T - k0, hs)
            fp32.load_tile(smem, V, qkv, first + 2 * C + k0 * 3 * C, 3 * C, T - k0, hs)
            cuda.syncthreads()
            fp32.rows_product(s, smem, 0, K, hs, T - q0)
            fp32.rows_product(ds, smem, DO, V, hs, T - q0)
            for i in range(4):
                for j in range(4):
                    p = math.exp(s[i, j] * SCALE - lses[i]) if k0 + tx + 16 * j <= q0 + 4 * ty + i else float32(0)
                    ds[i, j] = p * (ds[i, j] - delta[i])
            fp32.lay_down(ds, smem, P)
            fp32.columns_product(dq, smem, P, K, hs, T - q0)
        for i in range(4):
            delta[i] = SCALE
        fp32.store_tile(dqkv, first + q0 * 3 * C, 3 * C, T - q0, hs, dq, delta)

    return flash_fp32_dq_kernel


@functools.cache
def flash_fp32_dkv(hs):
    """The kernel that owns 64 keys and values a block and walks over the queries that see them, 64 a step."""
    HEAD, WIDTH, SCALE = fp32.ROWS * (hs + 4), 4 * ceil_div(hs, 64), float32(1 / math.sqrt(hs))
    V, Q, DO, P = HEAD, 2 * HEAD, 3 * HEAD, 4 * HEAD
    STATS = P + fp32.SCORES

    @cuda.jit(cache=True, fastmath=True)
    def flash_fp32_dkv_kernel(dqkv, stats, dout, qkv, NH):
        smem = cuda.shared.array(0, float32)  # tiles of k, v, q, dout, then p or ds transposed, then statistics
        ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
        _, T, C = dout.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        k0 = cuda.blockIdx.y * 64
        first, first_out = b * T * 3 * C + h * hs, b * T * C + h * hs
        p, ds = cuda.local.array((4, 4), float32), cuda.local.array((4, 4), float32)
        dk, dv = cuda.local.array((4, WIDTH), float32), cuda.local.array((4, WIDTH), float32)
        factors = cuda.local.array(4, float32)
        for i in range(4):
            factors[i] = float32(1)
            for c in range(WIDTH):
                dk[i, c], dv[i, c] = float32(0), float32(0)
        fp32.load_tile(smem, 0, qkv, first + C + k0 * 3 * C, 3 * C, T - k0, hs)
        fp32.load_tile(smem, V, qkv, first + 2 * C + k0 * 3 * C, 3 * C, T - k0, hs)
        for q0 in range(k0, T, 64):
            cuda.syncthreads()
            fp32.load_tile(smem, Q, qkv, first + q0 * 3 * C, 3 * C, T - q0, hs)
            fp32.load_tile(smem, DO, dout, first_out + q0 * C, C, T - q0, hs)
            if cuda.threadIdx.x < 128:
                smem[STATS + cuda.threadIdx.x] = stats[cuda.blockIdx.x, q0 + cuda.threadIdx.x // 2, cuda.threadIdx.x & 1]
            cuda.syncthreads()
            fp32.rows_product(p, smem, 0, Q, hs, T - k0)
            fp32.rows_product(ds, smem, V, DO, hs, T - k0)
            for j in range(4):
                q = tx + 16 * j
                for i in range(4):
                    seen = k0 + 4 * ty + i <= q0 + q
                    p[i, j] = math.exp(p[i, j] * SCALE - smem[STATS + 2 * q]) if seen else float32(0)
                    ds[i, j] = p[i, j] * (ds[i, j] - smem[STATS + 2 * q + 1])
            fp32.lay_down(p, smem, P)
            fp32.columns_product(dv, smem, P, DO, hs, T - k0)
            fp32.lay_down(ds, smem, P)
            fp32.columns_product(dk, smem, P, Q, hs, T - k0)
        fp32.store_tile(dqkv, first + 2 * C + k0 * 3 * C, 3 * C, T - k0, hs, dv, factors)
        for i in range(4):
            factors[i] = SCALE
        fp32.store_tile(dqkv, first + C + k0 * 3 * C, 3 * C, T - k0, hs, dk, factors)

    return flash_fp32_dkv_kernel


@attention_backward.version(5, "flash, tiles of 64 x 64 scores, 4 x 4 a thread in registers")
def attention_backward5(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """As attention_backward1, with a scratch of two numbers a row of a head; C / NH one of HEAD_SIZES. So from here on."""
    B, T, C = out.shape
    hs = head_size(C, NH)
    stats = statistics(B, T, NH)
    grid = (B * NH, ceil_div(T, 64))
    nbytes = 4 * (4 * fp32.ROWS * (hs + 4) + fp32.SCORES + 128)
    big_shared(flash_fp32_dq(hs), grid, fp32.THREADS, stream, nbytes)(dqkv, stats, dout, qkv, out, lse, NH)
    big_shared(flash_fp32_dkv(hs), grid, fp32.THREADS, stream, nbytes)(dqkv, stats, dout, qkv, NH)


def statistics(B, T, NH):
    """Scratch: the log-sum-exp and delta of each row of each head, and of as many more as make full tiles."""
    return scratch("attention_stats", (B * NH, 64 * ceil_div(T, 64), 2))


# Version 6 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def prepare_kernel6(dqkv, stats, dout, out, lse, NH):
    """A warp a row: its statistics, and zeros where dq will be summed up."""
    lane, i = cuda.threadIdx.x & 31, cuda.grid(1) >> 5
    Z, rows, _ = stats.shape
    _, T, C = out.shape
    if i < Z * rows:
        z, t = i // rows, i % rows
        b, h, hs = z // NH, z % NH, C // NH
        x = float32(0)
        if t < T:
            for c in range(h * hs + lane, (h + 1) * hs, 32):
                x += dout[b, t, c] * out[b, t, c]
                dqkv[b, t, c] = float32(0)
        x = warp_sum(x)
        if lane == 0:
            stats[z, t, 0] = lse[b, h, t] * float32(LOG2E) if t < T else SEES_NOTHING
            stats[z, t, 1] = x


@cuda.jit(device=True, cache=True, forceinline=True)
def stage_queries(smem, buffer, HS, hs, QUERIES, STATS, query0, stats, dout, qkv, first, first_out, first_stats):
    """Start to copy the queries from query0 on, their rows of dout and their statistics into one of the two buffers."""
    _, T, C = dout.shape
    TILE = QUERIES * HS
    stage(smem, buffer * TILE, HS, QUERIES, qkv, first + query0 * 3 * C, 3 * C, T - query0, hs)
    stage(smem, (2 + buffer) * TILE, HS, QUERIES, dout, first_out + query0 * C, C, T - query0, hs)
    if cuda.threadIdx.x < QUERIES // 2:
        i = 4 * cuda.threadIdx.x
        cp_async16(smem, STATS + buffer * 2 * QUERIES + i, stats, first_stats + 2 * query0 + i)
    cp_async_commit()


@cuda.jit(device=True, cache=True, forceinline=True)
def probabilities(p, smem, numbers, tf32):
    """Scores p of keys by queries become probabilities, rounded; the queries' statistics lie at `numbers`."""
    for n in range(p.shape[1]):
        lse0, _, lse1, _ = load4(smem, numbers + 16 * n + 4 * (cuda.threadIdx.x & 3))
        for m in range(p.shape[0]):
            for i in range(4):
                p[m, n, i] = operand(exp2_approx(p[m, n, i] - (lse1 if i & 1 else lse0)), tf32)


@cuda.jit(device=True, cache=True, forceinline=True)
def score_gradients(dp, p, smem, numbers, tf32):
    """Gradients dp of probabilities p become those of the scores, rounded."""
    for n in range(p.shape[1]):
        _, delta0, _, delta1 = load4(smem, numbers + 16 * n + 4 * (cuda.threadIdx.x & 3))
        for m in range(p.shape[0]):
            for i in range(4):
                dp[m, n, i] = operand(p[m, n, i] * (dp[m, n, i] - (delta1 if i & 1 else delta0)), tf32)


@functools.cache
def flash_tf32_atomics(hs):
    """The kernel that owns 64 keys and values a block, 16 a warp, walks over the queries that see them, 32 a step, and adds
    to the queries' dq what these keys contribute."""
    HS = 32 * ceil_div(hs, 32)
    K, KEYS, QUERIES, TILE = HS // 8, 64, 32, 32 * HS
    SCALE, SCALE2, ONE = float32(1 / math.sqrt(hs)), float32(LOG2E / math.sqrt(hs)), float32(1)
    KEPT, VALUE, KEY = 4 * TILE, 6 * TILE, 8 * TILE
    DS, STATS = 10 * TILE, 10 * TILE + KEYS * QUERIES

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS, 2))
    def flash_tf32_atomics_kernel(dqkv, stats, dout, qkv, NH):
        # two tiles of queries, two of dout; the block's keys and values as operands; its keys as a tile; ds transposed
        smem = cuda.shared.array(0, float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        g, t = lane >> 2, lane & 3
        _, T, C = dout.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        key0 = cuda.blockIdx.y * KEYS
        row0 = key0 + 16 * warp
        first, first_out = b * T * 3 * C + h * hs, b * T * C + h * hs
        first_stats = cuda.blockIdx.x * stats.shape[1] * 2
        step0, steps = key0 // QUERIES, (T + QUERIES - 1) // QUERIES
        stage(smem, KEY, HS, KEYS, qkv, first + C + key0 * 3 * C, 3 * C, T - key0, hs)
        stage_queries(
            smem, step0 & 1, HS, hs, QUERIES, STATS, step0 * QUERIES, stats, dout, qkv, first, first_out, first_stats
        )
        dk, dv = cuda.local.array((1, K, 4), float32), cuda.local.array((1, K, 4), float32)
        p, dp = cuda.local.array((1, 4, 4), float32), cuda.local.array((1, 4, 4), float32)
        factors = cuda.local.array((1, 2), float32)
        load_rows(dk, qkv, first + C, 3 * C, row0, T, hs, SCALE2, 1)
        keep_rows(smem, KEPT, dk)
        load_rows(dv, qkv, first + 2 * C, 3 * C, row0, T, hs, ONE, 1)
        keep_rows(smem, VALUE, dv)
        clear(dk)
        clear(dv)
        for step in range(step0, steps):
            query0, now, numbers = step * QUERIES, (step & 1) * TILE, STATS + (step & 1) * 2 * QUERIES
            cp_async_wait(0)
            if step == step0:
                round_staged(smem, KEY, HS, KEYS)
            round_staged(smem, now, HS, QUERIES)
            round_staged(smem, 2 * TILE + now, HS, QUERIES)
            cuda.syncthreads()
            if step + 1 < steps:
                stage_queries(
                    smem, (step + 1) & 1, HS, hs, QUERIES, STATS, query0 + QUERIES, stats, dout, qkv, first, first_out, first_stats
                )
            clear(p)
            add_rows_product_kept(p, smem, KEPT, smem, now, HS, 1)
            if query0 < row0 + 16:
                mask_below(p, row0 - query0)
            probabilities(p, smem, numbers, 1)
            add_columns_product(dv, p, smem, 2 * TILE + now, HS, 1)
            clear(dp)
            add_rows_product_kept(dp, smem, VALUE, smem, 2 * TILE + now, HS, 1)
            score_gradients(dp, p, smem, numbers, 1)
            add_columns_product(dk, dp, smem, now, HS, 1)
            for n in range(4):
                for r in range(2):
                    at = DS + (16 * warp + 8 * r + g) * 32 + 4 * ((2 * n + (t >> 1)) ^ swizzle(g)) + 2 * (t & 1)
                    store2(smem, at, dp[0, n, 2 * r], dp[0, n, 2 * r + 1])
            cuda.syncthreads()
            for part in range(warp, HS // 16, 4):
                add_dq(dqkv, first + query0 * 3 * C, T - query0, smem, KEY, DS, HS, hs, part >> 1, part & 1, SCALE)
        factors[0, 0] = factors[0, 1] = SCALE
        store_rows(dqkv, first + C, 3 * C, row0, T, hs, dk, factors)
        factors[0, 0] = factors[0, 1] = ONE
        store_rows(dqkv, first + 2 * C, 3 * C, row0, T, hs, dv, factors)

    return flash_tf32_atomics_kernel


@cuda.jit(device=True, cache=True, forceinline=True)
def add_dq(dqkv, first, valid, smem, key, ds, HS, hs, channels, half, scale):
    """Add scale * ds @ k to the dq of 16 of 32 queries in 32 channels, contracted over the block's 64 keys, transposed: the
    product's rows are channels, so that a lane ends with four neighbouring ones, and its columns queries."""
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    even, odd = swizzle(2 * t), swizzle(2 * t + 1)
    acc = cuda.local.array((2, 2, 4), float32)
    clear(acc)
    for k in range(2 * t, 64, 8):
        x0, x1, x2, x3 = load4(smem, key + k * HS + 32 * channels + 4 * (g ^ even))
        y0, y1, y2, y3 = load4(smem, key + (k + 1) * HS + 32 * channels + 4 * (g ^ odd))
        u0, u1 = load2(smem, ds + k * 32 + 4 * (g ^ even) + 2 * half)
        v0, v1 = load2(smem, ds + (k + 1) * 32 + 4 * (g ^ odd) + 2 * half)
        mma(acc, 0, 0, x0, x1, y0, y1, u0, v0)
        mma(acc, 0, 1, x0, x1, y0, y1, u1, v1)
        mma(acc, 1, 0, x2, x3, y2, y3, u0, v0)
        mma(acc, 1, 1, x2, x3, y2, y3, u1, v1)
    for n in range(2):
        for c in range(2):
            query, channel = 4 * (2 * t + c) + 2 * half + n, 32 * channels + 4 * g
            if query < valid and channel < hs:
                at = first + query * dqkv.shape[2] + channel
                d0, d1, d2, d3 = acc[0, n, c], acc[0, n, 2 + c], acc[1, n, c], acc[1, n, 2 + c]
                atomic_add4(dqkv, at, d0 * scale, d1 * scale, d2 * scale, d3 * scale)


@attention_backward.version(
    6, "flash on the tensor cores (TF32), one kernel, dq by atomics", precision="tf32", repeatable=False, needs_cc=(9, 0)
)
def attention_backward6(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """As attention_backward5."""
    B, T, C = out.shape
    hs = head_size(C, NH)
    stats = statistics(B, T, NH)
    prepare_kernel6[ceil_div(32 * stats.size // 2, 256), 256, stream](dqkv, stats, dout, out, lse, NH)
    nbytes = 4 * (320 * 32 * ceil_div(hs, 32) + 64 * 32 + 4 * 32)
    big_shared(flash_tf32_atomics(hs), (B * NH, ceil_div(T, 64)), THREADS, stream, nbytes)(dqkv, stats, dout, qkv, NH)


# Version 7 ------------------------------------------------------------------------------------------------------------


@functools.cache
def flash_tf32_dq(hs, M, KEYS, blocks, TF32):
    """The kernel that owns queries, 16 M a warp, and walks over their keys, KEYS a step."""
    HS = 32 * ceil_div(hs, 32)
    K, N, QUERIES, TILE = HS // 8, KEYS // 8, 64 * M, KEYS * HS
    SCALE = float32(1 / math.sqrt(hs))
    SCALE2, ONE = float32(LOG2E / math.sqrt(hs)), float32(1)
    DOUT = 4 * TILE

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS, blocks))
    def flash_tf32_dq_kernel(dqkv, stats, dout, qkv, out, lse, NH):
        smem = cuda.shared.array(0, float32)  # two tiles of keys, two of values, the block's rows of dout
        lane = cuda.threadIdx.x & 31
        g, t = lane >> 2, lane & 3
        _, T, C = out.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        query0 = (cuda.gridDim.y - 1 - cuda.blockIdx.y) * QUERIES
        row0 = query0 + (cuda.threadIdx.x >> 5) * (16 * M)
        first, first_out = b * T * 3 * C + h * hs, b * T * C + h * hs
        stage(smem, 0, HS, KEYS, qkv, first + C, 3 * C, T, hs)
        stage(smem, 2 * TILE, HS, KEYS, qkv, first + 2 * C, 3 * C, T, hs)
        cp_async_commit()
        q, dq = cuda.local.array((M, K, 4), float32), cuda.local.array((M, K, 4), float32)
        p, dp = cuda.local.array((M, N, 4), float32), cuda.local.array((M, N, 4), float32)
        lse2, delta = cuda.local.array((M, 2), float32), cuda.local.array((M, 2), float32)
        load_rows(q, dout, first_out, C, row0, T, hs, ONE, TF32)
        keep_rows(smem, DOUT, q)
        load_rows(q, qkv, first, 3 * C, row0, T, hs, SCALE2, TF32)
        for m in range(M):
            for r in range(2):
                row = row0 + 16 * m + 8 * r + g
                lse2[m, r] = SEES_NOTHING
                x = float32(0)
                if row < T:
                    lse2[m, r] = lse[b, h, row] * float32(LOG2E)
                    for k in range(hs // 16):
                        at = first_out + row * C + 16 * k + 4 * t
                        a0, a1, a2, a3 = load4(out, at)
                        d0, d1, d2, d3 = load4(dout, at)
                        x += a0 * d0 + a1 * d1 + a2 * d2 + a3 * d3
                x = quad_sum(x)
                delta[m, r] = x
                if t == 0 and row < stats.shape[1]:
                    stats[cuda.blockIdx.x, row, 0] = lse2[m, r]
                    stats[cuda.blockIdx.x, row, 1] = x
        clear(dq)
        steps = (min(query0 + QUERIES, T) + KEYS - 1) // KEYS
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
            if key0 < row0 + 16 * M:
                clear(p)
                add_rows_product(p, q, smem, now, HS, TF32)
                if key0 + KEYS > row0:
                    mask_above(p, row0 - key0)
                clear(dp)
                add_rows_product_kept(dp, smem, DOUT, smem, 2 * TILE + now, HS, TF32)
                for m in range(M):
                    for n in range(N):
                        for i in range(4):
                            r = i >> 1
                            x = exp2_approx(p[m, n, i] - lse2[m, r])
                            dp[m, n, i] = operand(x * (dp[m, n, i] - delta[m, r]), TF32)
                add_columns_product(dq, dp, smem, now, HS, TF32)
        for m in range(M):
            for r in range(2):
                lse2[m, r] = SCALE
        store_rows(dqkv, first, 3 * C, row0, T, hs, dq, lse2)

    return flash_tf32_dq_kernel


@functools.cache
def flash_tf32_dkv(hs, M, QUERIES, blocks, TF32):
    """The kernel that owns keys and values, 16 M a warp, and walks over the queries that see them, QUERIES a step."""
    HS = 32 * ceil_div(hs, 32)
    K, N, KEYS, TILE = HS // 8, QUERIES // 8, 64 * M, QUERIES * HS
    SCALE = float32(1 / math.sqrt(hs))
    SCALE2, ONE = float32(LOG2E / math.sqrt(hs)), float32(1)
    KEY, VALUE = 4 * TILE, 4 * TILE + KEYS * HS
    STATS = VALUE + KEYS * HS

    @cuda.jit(cache=True, fastmath=True, launch_bounds=(THREADS, blocks))
    def flash_tf32_dkv_kernel(dqkv, stats, dout, qkv, NH):
        smem = cuda.shared.array(0, float32)  # two tiles of queries, two of dout, the block's keys and values, statistics
        _, T, C = dout.shape
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        row0 = cuda.blockIdx.y * KEYS + (cuda.threadIdx.x >> 5) * (16 * M)
        first, first_out = b * T * 3 * C + h * hs, b * T * C + h * hs
        first_stats = cuda.blockIdx.x * stats.shape[1] * 2
        step0, steps = cuda.blockIdx.y * KEYS // QUERIES, (T + QUERIES - 1) // QUERIES
        stage_queries(
            smem, step0 & 1, HS, hs, QUERIES, STATS, step0 * QUERIES, stats, dout, qkv, first, first_out, first_stats
        )
        dk, dv = cuda.local.array((M, K, 4), float32), cuda.local.array((M, K, 4), float32)
        p, dp = cuda.local.array((M, N, 4), float32), cuda.local.array((M, N, 4), float32)
        factors = cuda.local.array((M, 2), float32)
        load_rows(dk, qkv, first + C, 3 * C, row0, T, hs, SCALE2, TF32)
        keep_rows(smem, KEY, dk)
        load_rows(dv, qkv, first + 2 * C, 3 * C, row0, T, hs, ONE, TF32)
        keep_rows(smem, VALUE, dv)
        clear(dk)
        clear(dv)
        for step in range(step0, steps):
            query0, now, numbers = step * QUERIES, (step & 1) * TILE, STATS + (step & 1) * 2 * QUERIES
            cp_async_wait(0)
            if TF32 == 1:
                round_staged(smem, now, HS, QUERIES)
                round_staged(smem, 2 * TILE + now, HS, QUERIES)
            cuda.syncthreads()
            if step + 1 < steps:
                stage_queries(
                    smem, (step + 1) & 1, HS, hs, QUERIES, STATS, query0 + QUERIES, stats, dout, qkv, first, first_out, first_stats
                )
            if query0 + QUERIES > row0:  # else every query of the step is before the warp's keys
                clear(p)
                add_rows_product_kept(p, smem, KEY, smem, now, HS, TF32)
                if query0 < row0 + 16 * M:
                    mask_below(p, row0 - query0)
                probabilities(p, smem, numbers, TF32)
                add_columns_product(dv, p, smem, 2 * TILE + now, HS, TF32)
                clear(dp)
                add_rows_product_kept(dp, smem, VALUE, smem, 2 * TILE + now, HS, TF32)
                score_gradients(dp, p, smem, numbers, TF32)
                add_columns_product(dk, dp, smem, now, HS, TF32)
        for m in range(M):
            for r in range(2):
                factors[m, r] = SCALE
        store_rows(dqkv, first + C, 3 * C, row0, T, hs, dk, factors)
        for m in range(M):
            for r in range(2):
                factors[m, r] = ONE
        store_rows(dqkv, first + 2 * C, 3 * C, row0, T, hs, dv, factors)

    return flash_tf32_dkv_kernel


def launch_flash_tf32_dq(dqkv, stats, dout, qkv, out, lse, NH, M, STEP, blocks, stream, tf32=1):
    B, T, C = out.shape
    hs = head_size(C, NH)
    nbytes = 4 * 32 * ceil_div(hs, 32) * (4 * STEP + 64 * M)
    kernel = flash_tf32_dq(hs, M, STEP, blocks, tf32)
    big_shared(kernel, (B * NH, ceil_div(T, 64 * M)), THREADS, stream, nbytes)(dqkv, stats, dout, qkv, out, lse, NH)


def launch_flash_tf32_dkv(dqkv, stats, dout, qkv, NH, M, STEP, blocks, stream, tf32=1):
    B, T, C = dout.shape
    hs = head_size(C, NH)
    nbytes = 4 * (32 * ceil_div(hs, 32) * (4 * STEP + 2 * 64 * M) + 4 * STEP)
    kernel = flash_tf32_dkv(hs, M, STEP, blocks, tf32)
    big_shared(kernel, (B * NH, ceil_div(T, 64 * M)), THREADS, stream, nbytes)(dqkv, stats, dout, qkv, NH)


@attention_backward.version(7, "flash TF32 in two kernels, no atomics", precision="tf32", needs_cc=(8, 0))
def attention_backward7(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """As attention_backward5."""
    B, T, C = out.shape
    stats = statistics(B, T, NH)
    M = 2 if C // NH <= 64 else 1
    launch_flash_tf32_dq(dqkv, stats, dout, qkv, out, lse, NH, M, 32, 2, stream)
    launch_flash_tf32_dkv(dqkv, stats, dout, qkv, NH, M, 32, 2, stream)


# Version 8 ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def row_statistics8(lse2, delta, stats, smem, dout, out, lse, b, h, row):
    """The log-sum-exp and delta of this thread's two rows, which stats gets as well, for the other kernel. In shared memory at
    `dout` and `out` lie the block's rows of these."""
    T, lane = int32(lse.shape[2]), int32(cuda.threadIdx.x) & 3
    own = int32(hopper.group_number() * hopper.TILE + (hopper.group_row() & 63) * 32)
    for r in range(2):
        at, x = int32(row + 8 * r), float32(0)
        lse2[r] = lse[b, h, min(at, T - 1)] * float32(LOG2E) if at < T else SEES_NOTHING
        for k in range(4):
            i = int32(own + (k >> 1) * hopper.HALF + 8 * 32 * r + 4 * ((4 * k + lane ^ row) & 7))
            a0, a1, a2, a3 = load4(smem, out + i)
            d0, d1, d2, d3 = load4(smem, dout + i)
            x += a0 * d0 + a1 * d1 + a2 * d2 + a3 * d3
        delta[r] = quad_sum(x)
        if lane == 0 and at < stats.shape[1]:
            stats[cuda.blockIdx.x, at, 0] = lse2[r]
            stats[cuda.blockIdx.x, at, 1] = delta[r]


@functools.cache
def flash_wgmma_dq():
    """The kernel that owns 128 queries a block, 64 a warp group, and walks over their keys, 64 a step."""
    TILE, STAGE = hopper.TILE, 3 * hopper.TILE
    QUERY, DOUT, OUT = 2 * STAGE, 2 * STAGE + 2 * TILE, 2 * STAGE + 4 * TILE  # before the last stage is needed, and behind it
    SCALE, SCALE2 = float32(1 / math.sqrt(64)), float32(LOG2E / math.sqrt(64) * hopper.MADE_UP)

    @cuda.jit(device=True)
    def copy(smem, stage, qkv, first, stride, key0, keys, T):
        if key0 < keys:
            hopper.copy_block(smem, stage, qkv, first, stride, key0, T)
            hopper.copy_block(smem, stage + 2 * TILE, qkv, first + stride // 3, stride, key0, T)
        cp_async_commit()

    @cuda.jit(device=True)
    def arrive(smem, stage):
        """Wait for all copies but the last one's, and turn the keys."""
        cp_async_wait(1)
        hopper.turn_block(smem, stage, stage + TILE)
        fence_async()
        cuda.syncthreads()

    @cuda.jit(fastmath=True, launch_bounds=(hopper.THREADS, 1))
    def flash_wgmma_dq_kernel(dqkv, stats, dout, qkv, out, lse, NH):
        # three times a tile of keys, the same transposed, one of values; the block's rows of q, dout and out
        smem = cuda.shared.array(0, float32, alignment=1024)
        _, T, C = out.shape
        T, stride = int32(T), int32(3 * C)
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        query0 = int32((cuda.gridDim.y - 1 - cuda.blockIdx.y) * hopper.ROWS)
        row, keys = int32(query0 + hopper.group_row()), min(int32(query0 + hopper.ROWS), T)
        end = int32(query0 + hopper.GROUP_ROWS * (hopper.group_number() + 1))  # of the keys that the group sees
        first, first_out = int64(b) * T * 3 * C + 64 * h, int64(b) * T * C + 64 * h
        q, do, dq = cuda.local.array(32, float32), cuda.local.array(32, float32), cuda.local.array(32, float32)
        p, dp = cuda.local.array(32, float32), cuda.local.array(32, float32)
        lse2, delta = cuda.local.array(2, float32), cuda.local.array(2, float32)
        hopper.copy_rows(smem, QUERY, qkv, first, stride, query0, T)
        hopper.copy_rows(smem, DOUT, dout, first_out, int32(C), query0, T)
        hopper.copy_rows(smem, OUT, out, first_out, int32(C), query0, T)
        cp_async_commit()
        copy(smem, 0, qkv, first + C, stride, int32(0), keys, T)
        copy(smem, STAGE, qkv, first + C, stride, int32(hopper.STEP), keys, T)
        cp_async_wait(2)
        cuda.syncthreads()
        hopper.rows_operand(q, smem, QUERY, SCALE2)
        hopper.rows_operand(do, smem, DOUT, hopper.MADE_UP)
        row_statistics8(lse2, delta, stats, smem, DOUT, OUT, lse, b, h, row)
        hopper.clear(dq)
        arrive(smem, 0)
        hopper.rows_product(p, q, smem, 0)
        hopper.wgmma_finish(p)
        key0, now, next, far = int32(0), int32(0), int32(STAGE), int32(2 * STAGE)
        while True:
            next0 = int32(key0 + hopper.STEP)
            hopper.rows_product(dp, do, smem, now + 2 * TILE)
            copy(smem, far, qkv, first + C, stride, int32(next0 + hopper.STEP), keys, T)
            hopper.wait_for(p)
            if next0 >= end:
                hopper.mask_above(p, row - key0)
            for i in range(32):
                p[i] = hopper.settled(exp2_approx(p[i] - lse2[i >> 1 & 1]))  # before the wait: dp is under way
            hopper.wgmma_finish(dp)
            for i in range(32):
                dp[i] = hopper.round_finite(p[i] * (dp[i] - delta[i >> 1 & 1]))
            hopper.add_columns_product(dq, dp, smem, now + TILE)
            if next0 >= keys:
                break
            arrive(smem, next)
            if next0 >= end:  # the last step is the other group's alone
                break
            hopper.rows_product(p, q, smem, next)
            hopper.wait_for(dq)
            key0, now, next, far = next0, next, far, now
        hopper.wgmma_finish(dq)
        hopper.store_rows(dqkv, first, 3 * C, row, T, dq, SCALE, SCALE)

    return keep_compiled(flash_wgmma_dq_kernel)


@functools.cache
def flash_wgmma_dkv():
    """The kernel that owns 128 keys and values a block, 64 a warp group, and walks over the queries that see them, 64 a step,
    the last ones first."""
    TILE, STAGE = hopper.TILE, 4 * hopper.TILE
    KEY, VALUE = 2 * STAGE, 2 * STAGE + 2 * TILE  # the block's rows, before the last stage is needed
    STATS = 3 * STAGE  # where a stage's statistics stand, 2 * hopper.STEP floats behind those of the one before
    SCALE, SCALE2 = float32(1 / math.sqrt(64)), float32(LOG2E / math.sqrt(64) * hopper.MADE_UP)

    @cuda.jit(device=True)
    def copy(smem, stage, stats, dout, qkv, first, first_out, query0, key0, T):
        if query0 >= key0:
            hopper.copy_block(smem, stage, qkv, first, int32(qkv.shape[2]), query0, T)
            hopper.copy_block(smem, stage + 2 * TILE, dout, first_out, int32(dout.shape[2]), query0, T)
            if cuda.threadIdx.x < hopper.STEP // 2:
                i = 4 * cuda.threadIdx.x
                at = 2 * (int64(cuda.blockIdx.x) * stats.shape[1] + query0) + i
                cp_async16(smem, STATS + stage // 128 + i, stats, at)
        cp_async_commit()

    @cuda.jit(device=True)
    def arrive(smem, stage):
        """Wait for all copies but the last one's, and turn them."""
        cp_async_wait(1)
        hopper.turn_block(smem, stage, stage + TILE)
        hopper.turn_block(smem, stage + 2 * TILE, stage + 3 * TILE)
        fence_async()
        cuda.syncthreads()

    @cuda.jit(fastmath=True, launch_bounds=(hopper.THREADS, 1))
    def flash_wgmma_dkv_kernel(dqkv, stats, dout, qkv, NH):
        # three times a tile of queries, the same transposed, one of dout, the same transposed; the queries' statistics
        smem = cuda.shared.array(0, float32, alignment=1024)
        _, T, C = dout.shape
        T = int32(T)
        b, h = cuda.blockIdx.x // NH, cuda.blockIdx.x % NH
        key0 = int32(cuda.blockIdx.y * hopper.ROWS)
        row, group0 = int32(key0 + hopper.group_row()), int32(key0 + hopper.GROUP_ROWS * hopper.group_number())
        first, first_out = int64(b) * T * 3 * C + 64 * h, int64(b) * T * C + 64 * h
        k, v = cuda.local.array(32, float32), cuda.local.array(32, float32)
        dk, dv = cuda.local.array(32, float32), cuda.local.array(32, float32)
        p, dp = cuda.local.array(32, float32), cuda.local.array(32, float32)
        query0 = int32((T - 1) // hopper.STEP * hopper.STEP)
        hopper.copy_rows(smem, KEY, qkv, first + C, int32(3 * C), key0, T)
        hopper.copy_rows(smem, VALUE, qkv, first + 2 * C, int32(3 * C), key0, T)
        cp_async_commit()
        copy(smem, 0, stats, dout, qkv, first, first_out, query0, key0, T)
        copy(smem, STAGE, stats, dout, qkv, first, first_out, int32(query0 - hopper.STEP), key0, T)
        cp_async_wait(2)
        cuda.syncthreads()
        hopper.rows_operand(k, smem, KEY, SCALE2)
        hopper.rows_operand(v, smem, VALUE, hopper.MADE_UP)
        hopper.clear(dk)
        hopper.clear(dv)
        arrive(smem, 0)
        hopper.rows_product(p, k, smem, 0)
        hopper.wgmma_finish(p)
        now, next, far = int32(0), int32(STAGE), int32(2 * STAGE)
        while True:
            next0 = int32(query0 - hopper.STEP)
            numbers = int32(STATS + now // 128 + 4 * (int32(cuda.threadIdx.x) & 3))
            hopper.rows_product(dp, v, smem, now + 2 * TILE)
            copy(smem, far, stats, dout, qkv, first, first_out, int32(next0 - hopper.STEP), key0, T)
            hopper.wait_for(p)
            if query0 < group0 + hopper.GROUP_ROWS:
                hopper.mask_below(p, row - query0)
            for j in range(8):
                lse0, _, lse1, _ = load4(smem, numbers + 16 * j)
                for i in range(4 * j, 4 * j + 4):
                    p[i] = hopper.round_finite(exp2_approx(p[i] - (lse1 if i & 1 else lse0)))
            hopper.add_columns_product(dv, p, smem, now + 3 * TILE)
            hopper.wait_for(dp)
            for j in range(8):
                _, delta0, _, delta1 = load4(smem, numbers + 16 * j)
                for i in range(4 * j, 4 * j + 4):
                    dp[i] = hopper.round_finite(p[i] * (dp[i] - (delta1 if i & 1 else delta0)))
            hopper.add_columns_product(dk, dp, smem, now + TILE)
            if next0 < key0:
                break
            arrive(smem, next)
            if next0 < group0:  # the last step is the other group's alone
                break
            hopper.wait_for(dv)
            hopper.rows_product(p, k, smem, next)
            hopper.wait_for(dk)
            query0, now, next, far = next0, next, far, now
        hopper.wgmma_finish(dv)
        hopper.wgmma_finish(dk)
        hopper.store_rows(dqkv, first + C, 3 * C, row, T, dk, SCALE, SCALE)
        hopper.store_rows(dqkv, first + 2 * C, 3 * C, row, T, dv, float32(1), float32(1))

    return keep_compiled(flash_wgmma_dkv_kernel)


@attention_backward.version(
    8, "wgmma, the products run on under the softmax", precision="tf32", needs_cc=(9, 0), needs=missing
)
def attention_backward8(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """As attention_backward5, for heads of 64 channels."""
    B, T, C = out.shape
    hopper.check_head_size(head_size(C, NH))
    stats, grid = statistics(B, T, NH), (B * NH, ceil_div(T, hopper.ROWS))
    dq = big_shared(flash_wgmma_dq(), grid, hopper.THREADS, stream, 4 * 12 * hopper.TILE)
    dq(dqkv, stats, dout, qkv, out, lse, NH)
    dkv = big_shared(flash_wgmma_dkv(), grid, hopper.THREADS, stream, 4 * 3 * (4 * hopper.TILE + 2 * hopper.STEP))
    dkv(dqkv, stats, dout, qkv, NH)


# Version 9 ------------------------------------------------------------------------------------------------------------


@attention_backward.version(
    9, "flash in two kernels, three products of TF32 for each", precision="3xtf32", needs_cc=(8, 0)
)
def attention_backward9(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """As attention_backward5."""
    B, T, C = out.shape
    stats = statistics(B, T, NH)
    keys, queries = (64, 32) if C // NH <= 64 else (16, 16)  # a step: as many as the registers hold
    launch_flash_tf32_dq(dqkv, stats, dout, qkv, out, lse, NH, 1, keys, 2, stream, tf32=3)
    launch_flash_tf32_dkv(dqkv, stats, dout, qkv, NH, 1, queries, 2, stream, tf32=3)
