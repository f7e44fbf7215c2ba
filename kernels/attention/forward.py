"""Attention forward."""

import functools
import math

import numpy as np

import cpu_reference
from kernels.attention.tiles import (
    MASKED, THREADS, add_columns_product, add_rows_product, clear, load_rows, mask_above, quad_max, quad_sum, round_staged, round_tf32, stage, store_rows,
)  # fmt: skip
from kernels.device import big_shared, ceil_div, cp_async_commit, cp_async_wait, cuda, exp2_approx, float32, need
from kernels.op import Op

attention_forward = Op(
    reference=cpu_reference.attention_forward,
    inputs=lambda rng, B, T, NH, hs: {"qkv": rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32), "NH": NH},
    outputs=lambda B, T, NH, hs: {"out": (B, T, NH * hs), "lse": (B, NH, T)},
    bytes_moved=lambda B, T, NH, hs: 4 * B * T * NH * (4 * hs + 1),
    flops=lambda B, T, NH, hs: 2 * B * NH * T * (T + 1) * hs,
    shape={"B": 4, "T": 1024, "NH": 12, "hs": 64},
    small={"B": 1, "T": 18, "NH": 2, "hs": 16},
    odd=[{"B": 2, "T": T, "NH": 3, "hs": hs} for T, hs in ((1, 64), (47, 64), (33, 16), (65, 32), (100, 80), (7, 96), (130, 128))],
)

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
LOG2E, LN2 = math.log2(math.e), float32(math.log(2))


@cuda.jit(device=True, cache=True, forceinline=True)
def online_softmax(s, o, top, total):
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
                    s[m, n, 2 * r + i] = round_tf32(p)
            total[m, r] = y
            for n in range(o.shape[1]):
                o[m, n, 2 * r] *= shrink
                o[m, n, 2 * r + 1] *= shrink


@functools.cache
def flash_tf32(hs, M, KEYS, heavy_first, blocks):
    """The kernel for a head size: 16 M queries a warp, KEYS keys a step."""
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
        load_rows(q, qkv, first, 3 * C, row0, T, hs, SCALE)
        clear(o)
        for m in range(M):
            for r in range(2):
                top[m, r] = MASKED
                total[m, r] = float32(0)
        steps = (min(block * QUERIES + QUERIES, T) + KEYS - 1) // KEYS
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
            if key0 < row0 + 16 * M:  # else every key of the step is right of the warp's rows
                clear(s)
                add_rows_product(s, q, smem, now, HS)
                if key0 + KEYS > row0:
                    mask_above(s, row0 - key0)
                online_softmax(s, o, top, total)
                add_columns_product(o, s, smem, 2 * TILE + now, HS)
        for m in range(M):
            for r in range(2):
                y = quad_sum(total[m, r])
                row = row0 + 16 * m + 8 * r + g
                total[m, r] = float32(1) / y
                if t == 0 and row < T:
                    lse[b, h, row] = top[m, r] * LN2 + math.log(y)
        store_rows(out, b * T * C + h * hs, C, row0, T, hs, o, total)

    return flash_tf32_kernel


def launch_flash_tf32(out, lse, qkv, NH, M, KEYS, heavy_first, blocks, stream):
    B, T, C = out.shape
    hs = C // NH
    need(hs * NH == C and hs in HEAD_SIZES, f"needs a head size among {HEAD_SIZES}, got {C} channels in {NH} heads")
    kernel = flash_tf32(hs, M, KEYS, heavy_first, blocks)
    grid = (B * NH, ceil_div(T, 64 * M))
    nbytes = 4 * 4 * KEYS * 32 * ceil_div(hs, 32)
    big_shared(kernel, grid, THREADS, stream, nbytes)(out, lse, qkv, NH)


@attention_forward.version(6, "flash on the tensor cores (TF32), keys and values copied ahead", precision="tf32", needs_cc=(8, 0))
def attention_forward6(out, lse, qkv, NH, *, stream=0):
    """out (B,T,C), lse (B,NH,T), qkv (B,T,3C): float32, on the device; C / NH one of HEAD_SIZES."""
    launch_flash_tf32(out, lse, qkv, NH, 1, 32, False, 3, stream)


@attention_forward.version(7, "32 queries a warp, long rows first", precision="tf32", needs_cc=(8, 0))
def attention_forward7(out, lse, qkv, NH, *, stream=0):
    """As attention_forward6."""
    if out.shape[2] // NH <= 64:
        launch_flash_tf32(out, lse, qkv, NH, 2, 64, True, 2, stream)
    else:
        launch_flash_tf32(out, lse, qkv, NH, 1, 32, True, 2, stream)
