"""Attention backward."""

import functools
import math

import numpy as np

import cpu_reference
from kernels.attention.forward import HEAD_SIZES, LOG2E
from kernels.attention.tiles import (
    THREADS, add_columns_product, add_rows_product, add_rows_product_kept, clear, keep_rows, load_rows,
    mask_above, mask_below, quad_sum, round_staged,
    round_tf32, stage, store_rows,
)  # fmt: skip
from kernels.device import (
    big_shared, ceil_div, cp_async16, cp_async_commit, cp_async_wait, cuda, exp2_approx, float32, load4, need, scratch,
)  # fmt: skip
from kernels.op import Op


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
    shape={"B": 4, "T": 1024, "NH": 12, "hs": 64},
    small={"B": 1, "T": 18, "NH": 2, "hs": 16},
    odd=[{"B": 2, "T": T, "NH": 3, "hs": hs} for T, hs in ((1, 64), (47, 64), (33, 16), (65, 32), (100, 80), (7, 96), (130, 128))],
)

SEES_NOTHING = float32(1e30)  # a log-sum-exp so large that every probability of the row is zero
ROWS = 64  # statistics are padded to a multiple of this many queries


def check_heads(C, NH):
    need(C % NH == 0 and C // NH in HEAD_SIZES, f"needs a head size among {HEAD_SIZES}, got {C} channels in {NH} heads")
    return C // NH


@functools.cache
def flash_tf32_dq(hs, M, KEYS, blocks):
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
        load_rows(q, dout, first_out, C, row0, T, hs, ONE)
        keep_rows(smem, DOUT, q)
        load_rows(q, qkv, first, 3 * C, row0, T, hs, SCALE2)
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
                add_rows_product(p, q, smem, now, HS)
                if key0 + KEYS > row0:
                    mask_above(p, row0 - key0)
                clear(dp)
                add_rows_product_kept(dp, smem, DOUT, smem, 2 * TILE + now, HS)
                for m in range(M):
                    for n in range(N):
                        for i in range(4):
                            r = i >> 1
                            x = exp2_approx(p[m, n, i] - lse2[m, r])
                            dp[m, n, i] = round_tf32(x * (dp[m, n, i] - delta[m, r]))
                add_columns_product(dq, dp, smem, now, HS)
        for m in range(M):
            for r in range(2):
                lse2[m, r] = SCALE
        store_rows(dqkv, first, 3 * C, row0, T, hs, dq, lse2)

    return flash_tf32_dq_kernel


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


@functools.cache
def flash_tf32_dkv(hs, M, QUERIES, blocks):
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
        lane = cuda.threadIdx.x & 31
        t = lane & 3
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
        load_rows(dk, qkv, first + C, 3 * C, row0, T, hs, SCALE2)
        keep_rows(smem, KEY, dk)
        load_rows(dv, qkv, first + 2 * C, 3 * C, row0, T, hs, ONE)
        keep_rows(smem, VALUE, dv)
        clear(dk)
        clear(dv)
        for step in range(step0, steps):
            query0, now, numbers = step * QUERIES, (step & 1) * TILE, STATS + (step & 1) * 2 * QUERIES
            cp_async_wait(0)
            round_staged(smem, now, HS, QUERIES)
            round_staged(smem, 2 * TILE + now, HS, QUERIES)
            cuda.syncthreads()
            if step + 1 < steps:
                stage_queries(
                    smem, (step + 1) & 1, HS, hs, QUERIES, STATS, query0 + QUERIES, stats, dout, qkv, first, first_out, first_stats
                )
            if query0 + QUERIES > row0:  # else every query of the step is before the warp's keys
                clear(p)
                add_rows_product_kept(p, smem, KEY, smem, now, HS)
                if query0 < row0 + 16 * M:
                    mask_below(p, row0 - query0)
                for n in range(N):
                    lse0, _, lse1, _ = load4(smem, numbers + 16 * n + 4 * t)
                    for m in range(M):
                        for i in range(4):
                            p[m, n, i] = round_tf32(exp2_approx(p[m, n, i] - (lse1 if i & 1 else lse0)))
                add_columns_product(dv, p, smem, 2 * TILE + now, HS)
                clear(dp)
                add_rows_product_kept(dp, smem, VALUE, smem, 2 * TILE + now, HS)
                for n in range(N):
                    _, delta0, _, delta1 = load4(smem, numbers + 16 * n + 4 * t)
                    for m in range(M):
                        for i in range(4):
                            dp[m, n, i] = round_tf32(p[m, n, i] * (dp[m, n, i] - (delta1 if i & 1 else delta0)))
                add_columns_product(dk, dp, smem, now, HS)
        for m in range(M):
            for r in range(2):
                factors[m, r] = SCALE
        store_rows(dqkv, first + C, 3 * C, row0, T, hs, dk, factors)
        for m in range(M):
            for r in range(2):
                factors[m, r] = ONE
        store_rows(dqkv, first + 2 * C, 3 * C, row0, T, hs, dv, factors)

    return flash_tf32_dkv_kernel


def launch_flash_tf32_dq(dqkv, stats, dout, qkv, out, lse, NH, M, STEP, blocks, stream):
    B, T, C = out.shape
    hs = check_heads(C, NH)
    nbytes = 4 * 32 * ceil_div(hs, 32) * (4 * STEP + 64 * M)
    kernel = flash_tf32_dq(hs, M, STEP, blocks)
    big_shared(kernel, (B * NH, ceil_div(T, 64 * M)), THREADS, stream, nbytes)(dqkv, stats, dout, qkv, out, lse, NH)


def launch_flash_tf32_dkv(dqkv, stats, dout, qkv, NH, M, STEP, blocks, stream):
    B, T, C = dout.shape
    hs = check_heads(C, NH)
    nbytes = 4 * (32 * ceil_div(hs, 32) * (4 * STEP + 2 * 64 * M) + 4 * STEP)
    kernel = flash_tf32_dkv(hs, M, STEP, blocks)
    big_shared(kernel, (B * NH, ceil_div(T, 64 * M)), THREADS, stream, nbytes)(dqkv, stats, dout, qkv, NH)


@attention_backward.version(7, "flash TF32 in two kernels, no atomics", precision="tf32", needs_cc=(8, 0))
def attention_backward7(dqkv, dout, qkv, out, lse, NH, *, stream=0):
    """dqkv, qkv (B,T,3C); dout, out (B,T,C); lse (B,NH,T): float32, on the device; C / NH one of HEAD_SIZES."""
    B, T, C = out.shape
    stats = scratch("attention_stats", (B * NH, ROWS * ceil_div(T, ROWS), 2))
    M = 2 if C // NH <= 64 else 1
    launch_flash_tf32_dq(dqkv, stats, dout, qkv, out, lse, NH, M, 32, 2, stream)
    launch_flash_tf32_dkv(dqkv, stats, dout, qkv, NH, M, 32, 2, stream)
