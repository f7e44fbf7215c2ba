"""Triangular matmul: preatt = q k^T / sqrt(hs) in each of NH heads, on the diagonal and left of it: all that causal
attention wants to know. q and k lie in qkv (B,T,3C), a head's row hs floats, the next row 3C floats on.

version 0: cuBLASLt, a strided batch of NH heads for each b; it knows no triangle and computes twice as much
version 1: a thread an element; every multiply-add waits for two loads
version 2: a thread 8 x 8 elements in registers: 64 multiply-adds for 16 loads; blocks right of the diagonal are skipped
version 3: the block's rows of q and k come to shared memory once, in whole lines, and are read there by everybody
version 4: 16 bytes a read, no two of them in one bank; copies that run while others multiply; 16 bytes a store
version 5: the same around the tensor cores, in TF32
"""

import functools
import math

import numpy as np

import cpu_reference
from kernels import cublas
from kernels.device import (
    big_shared,
    ceil_div,
    cp_async_commit,
    cp_async_wait,
    cuda,
    float32,
    int32,
    int64,
    load4,
    need,
    store4_streaming,
    uint64,
)  # fmt: skip
from kernels.matmul.cores import tensor_core
from kernels.matmul.engine import is_aligned
from kernels.matmul.epilogue import STORE
from kernels.matmul.tiles import BK, Tile, copy_tile, swizzle
from kernels.op import Op

trimat_forward = Op(
    reference=cpu_reference.trimat_forward,
    inputs=lambda rng, B, T, NH, hs: {"qkv": rng.standard_normal((B, T, 3 * NH * hs), dtype=np.float32), "NH": NH},
    outputs=lambda B, T, NH, hs: {"preatt": (B, NH, T, T)},
    bytes_moved=lambda B, T, NH, hs: 4 * B * NH * (2 * T * hs + T * (T + 1) // 2),
    flops=lambda B, T, NH, hs: B * NH * T * (T + 1) * hs,
    sizes=lambda given: {
        "B": len(given["qkv"]), "T": given["qkv"].shape[1], "NH": given["NH"], "hs": given["qkv"].shape[2] // 3 // given["NH"]
    },
    shape={"B": 8, "T": 1024, "NH": 12, "hs": 64},
    small={"B": 1, "T": 20, "NH": 2, "hs": 16},
    odd=[  # one row; heads and rows that are not whole 16 bytes; three tiles; a third step of channels, and not all of it
        {"B": B, "T": T, "NH": NH, "hs": hs}
        for B, T, NH, hs in ((1, 1, 1, 64), (2, 6, 2, 3), (1, 9, 1, 4), (1, 130, 1, 8), (1, 5, 1, 100))
    ],
    trainer_shapes=[{"B": 4, "T": 1024, "NH": 12, "hs": 64}],
    compared={"preatt": np.tril},
)  # fmt: skip

TILE = 128  # rows and columns of preatt a block


def sizes(preatt, qkv, NH) -> tuple[int, int, int]:
    """Heads in all, T, and the channels of a head; ShapeError if those cannot be."""
    B, T, channels = qkv.shape
    need(channels % (3 * NH) == 0, f"needs 3 * NH * hs channels, got {channels} for NH = {NH}")
    return B * NH, T, channels // 3 // NH


# Version 0 ------------------------------------------------------------------------------------------------------------


@trimat_forward.version(0, "cuBLASLt, a batch of NH heads for each b; the whole square", precision="either", needs=cublas.missing)
def trimat_forward0(preatt, qkv, NH, *, tf32=True, stream=0):
    """preatt (B,NH,T,T), also written right of the diagonal; qkv (B,T,3C): float32, on the device; C a multiple of NH.

    The heads of one b are hs floats apart throughout, in different b they are not: hence B products."""
    Z, T, hs = sizes(preatt, qkv, NH)
    C, start = NH * hs, cublas.address(qkv)
    scale = np.full(1, 1 / math.sqrt(hs), np.float32)
    for b in range(Z // NH):
        q = cublas.Matrix(start + 4 * b * T * 3 * C, T, hs, 3 * C, NH, hs)
        k = cublas.Matrix(q.pointer + 4 * C, T, hs, 3 * C, NH, hs)
        d = cublas.Matrix(cublas.address(preatt) + 4 * b * NH * T * T, T, T, T, NH, T * T)
        cublas.product(d, q, k, trans_b=True, alpha=scale, tf32=tf32, stream=stream)


# Version 1 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True)
def trimat_forward_kernel1(preatt, qkv, NH, scale):
    """preatt (B*NH,T,T)."""
    i = cuda.grid(1)
    T = preatt.shape[1]
    if i < preatt.size:
        z, row, column = i // (T * T), i // T % T, i % T
        C = qkv.shape[2] // 3
        hs = C // NH
        if column <= row:
            total = float32(0)
            for c in range(z % NH * hs, (z % NH + 1) * hs):
                total += qkv[z // NH, row, c] * qkv[z // NH, column, C + c]
            preatt[z, row, column] = total * scale


@trimat_forward.version(1, "a thread an element")
def trimat_forward1(preatt, qkv, NH, *, block_size=256, stream=0):
    """preatt (B,NH,T,T), not written right of the diagonal; qkv (B,T,3C): float32, on the device; C a multiple of NH."""
    Z, T, hs = sizes(preatt, qkv, NH)
    scale = float32(1 / math.sqrt(hs))
    grid = ceil_div(preatt.size, block_size)
    trimat_forward_kernel1[grid, block_size, stream](preatt.reshape(Z, T, T), qkv, NH, scale)


# Version 2 ------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True)
def place_of(block, T):
    """A block's head and the first row and column of its tile. The triangle of n (n + 1) / 2 tiles of a head is folded into
    a rectangle: line y of it holds row y of tiles, then row n - 1 - y. If n is odd, the middle row meets itself: then what
    comes second is sent right of the diagonal, where there is nothing to do."""
    n = (T + int32(TILE - 1)) // int32(TILE)
    width, lines = n + 1, (n + 1) // 2
    z, place = block // (width * lines), block % (width * lines)
    x, y = place % width, place // width
    row, column = y, x
    if x > y:
        row = n - 1 - y
        column = x - y - 1 if row > y else n
    return int32(z), int32(row * TILE), int32(column * TILE)


def tiles(Z: int, T: int) -> int:
    """How many blocks `place_of` has places for."""
    n = ceil_div(T, TILE)
    return Z * (n + 1) * ((n + 1) // 2)


@cuda.jit(device=True, cache=True)
def store_8x8(preatt, z, row, column, sums, scale):
    """A thread's elements, those right of the diagonal left out."""
    for i in range(8):
        for j in range(8):
            if column + j <= row + i and row + i < preatt.shape[1]:
                preatt[z, row + i, column + j] = sums[i, j] * scale


@cuda.jit(cache=True, fastmath=True, launch_bounds=(256,))
def trimat_forward_kernel2(preatt, qkv, NH, scale):
    """128 x 128 elements a block; thread (x, y) has rows 8 y to 8 y + 7 of columns 8 x to 8 x + 7."""
    sums = cuda.local.array((8, 8), float32)
    a = cuda.local.array(8, float32)
    b = cuda.local.array(8, float32)
    T, C = preatt.shape[1], qkv.shape[2] // 3
    hs = C // NH
    z, row, column = place_of(cuda.blockIdx.x, T)
    row, column = row + cuda.threadIdx.x // 16 * 8, column + cuda.threadIdx.x % 16 * 8
    if row < T and column <= row:
        for i in range(8):
            for j in range(8):
                sums[i, j] = float32(0)
        for c in range(z % NH * hs, (z % NH + 1) * hs):
            for i in range(8):  # past the end the last row again: nobody stores what becomes of it
                a[i] = qkv[z // NH, min(row + i, T - 1), c]
                b[i] = qkv[z // NH, min(column + i, T - 1), C + c]
            for i in range(8):
                for j in range(8):
                    sums[i, j] += a[i] * b[j]
        store_8x8(preatt, z, row, column, sums, scale)


@trimat_forward.version(2, "a thread 8 x 8 elements, nothing right of the diagonal")
def trimat_forward2(preatt, qkv, NH, *, stream=0):
    """As trimat_forward1."""
    Z, T, hs = sizes(preatt, qkv, NH)
    scale = float32(1 / math.sqrt(hs))
    trimat_forward_kernel2[tiles(Z, T), 256, stream](preatt.reshape(Z, T, T), qkv, NH, scale)


# Version 3 ------------------------------------------------------------------------------------------------------------


@cuda.jit(cache=True, fastmath=True, launch_bounds=(256,))
def trimat_forward_kernel3(preatt, qkv, NH, scale):
    """Version 2, 32 channels at a time from shared memory. A warp copies a row's 32 channels, a line of 128 bytes."""
    q = cuda.shared.array((TILE, 32), float32)
    k = cuda.shared.array((TILE, 32), float32)
    sums = cuda.local.array((8, 8), float32)
    a = cuda.local.array(8, float32)
    b = cuda.local.array(8, float32)
    T, C = preatt.shape[1], qkv.shape[2] // 3
    hs = C // NH
    z, row, column = place_of(cuda.blockIdx.x, T)
    if column > row:
        return
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    y, x = cuda.threadIdx.x // 16 * 8, cuda.threadIdx.x % 16 * 8
    busy = row + y < T and column + x <= row + y
    for i in range(8):
        for j in range(8):
            sums[i, j] = float32(0)
    for c in range(0, hs, 32):
        at = z % NH * hs + c + lane
        for i in range(warp, TILE, 8):
            q[i, lane] = qkv[z // NH, row + i, at] if row + i < T and c + lane < hs else float32(0)
            k[i, lane] = qkv[z // NH, column + i, C + at] if column + i < T and c + lane < hs else float32(0)
        cuda.syncthreads()
        if busy:
            for d in range(min(32, hs - c)):
                for i in range(8):
                    a[i] = q[y + i, d]
                    b[i] = k[x + i, d]
                for i in range(8):
                    for j in range(8):
                        sums[i, j] += a[i] * b[j]
        cuda.syncthreads()
    if busy:
        store_8x8(preatt, z, row + y, column + x, sums, scale)


@trimat_forward.version(3, "tiles of q and k in shared memory, loaded in whole lines")
def trimat_forward3(preatt, qkv, NH, *, stream=0):
    """As trimat_forward1."""
    Z, T, hs = sizes(preatt, qkv, NH)
    scale = float32(1 / math.sqrt(hs))
    trimat_forward_kernel3[tiles(Z, T), 256, stream](preatt.reshape(Z, T, T), qkv, NH, scale)


# Versions 4 and 5 -----------------------------------------------------------------------------------------------------
# The tiles in shared memory are like those of the matmul's engine: a row 32 channels, 128 bytes, its eight pieces of 16 bytes
# swizzled, for either arithmetic in its own way. Two steps of 32 channels are there at a time, which with a head of 64 is all.

FP32 = Tile(TILE, TILE, 32, 64, stages=2, blocks=2)
TF32 = Tile(TILE, TILE, 64, 64, stages=2, blocks=2)


@cuda.jit(device=True, cache=True)
def swizzle_fp32(row, piece):
    """Where a row keeps a piece, for version 4: lanes read rows that are 4 apart, so each four rows have another place."""
    return piece ^ (row >> 2) & 7


@cuda.jit(device=True, cache=True)
def lane_place(lane):
    """(y, x) of 4 x 8: y is bits 0 and 4 of the lane's number, x is bits 1 to 3. So a lane and its neighbour (number ^ 1, or
    number ^ 2) read the same 16 bytes, and half a warp can be served at once where it would be a quarter else."""
    return lane & 1 | lane >> 3 & 2, lane >> 1 & 7


@cuda.jit(device=True, cache=True)
def multiply_fp32(sums, shared, at_q, at_k, row, column, lane, pieces):
    """sums[8 i + j] += the products of a step of 4 * pieces channels for a warp's tile of 32 x 64.

    Lane (y, x) has rows 4 y to 4 y + 3 of each 16, and columns 4 x to 4 x + 3 of each 32: the rows of the tiles that half a
    warp reads at once lie in different banks."""
    a = cuda.local.array((2, 4), float32)  # one is loaded while the other is multiplied
    b = cuda.local.array((8, 4), float32)
    y, x = lane_place(lane)
    at_q += (row + 4 * y) * BK
    at_k += (column + 4 * x) * BK
    for piece in range(pieces):
        start = at_k + 4 * swizzle_fp32(4 * x, piece)
        for j in range(8):
            b[j, 0], b[j, 1], b[j, 2], b[j, 3] = load4(shared, start + (j // 4 * 32 + j % 4) * BK)
        start = at_q + 4 * swizzle_fp32(4 * y, piece)
        a[0, 0], a[0, 1], a[0, 2], a[0, 3] = load4(shared, start)
        for i in range(8):
            now, next = i % 2, (i + 1) % 2
            if i < 7:
                more = (i + 1) // 4 * 16
                start = at_q + 4 * swizzle_fp32(4 * y + more, piece) + (more + (i + 1) % 4) * BK
                a[next, 0], a[next, 1], a[next, 2], a[next, 3] = load4(shared, start)
            for c in range(4):
                for j in range(8):
                    sums[8 * i + j] += a[now, c] * b[j, c]


@functools.cache
def multiply_tf32():
    """A device function: multiply_fp32 on the tensor cores for a warp's tile of 64 x 64, always a whole step."""
    core = tensor_core(TF32, False, False, STORE, True)
    A, B, read, round_b, multiply_slice = core.a, core.b, core.read, core.prepare, core.multiply

    @cuda.jit(device=True)
    def multiply(sums, shared, at_q, at_k, row, column, lane, pieces):
        a0 = cuda.local.array(A, float32)
        b0 = cuda.local.array(B, float32)
        a1 = cuda.local.array(A, float32)
        b1 = cuda.local.array(B, float32)
        read(a0, b0, shared, at_q, at_k, row, column, 0, 0, lane)
        round_b(b0)
        read(a1, b1, shared, at_q, at_k, row, column, 0, 1, lane)
        multiply_slice(sums, a0, b0, b1)
        read(a0, b0, shared, at_q, at_k, row, column, 0, 2, lane)
        multiply_slice(sums, a1, b1, b0)
        read(a1, b1, shared, at_q, at_k, row, column, 0, 3, lane)
        multiply_slice(sums, a0, b0, b1)
        multiply_slice(sums, a1, b1, b0)

    return multiply


@functools.cache
def store_four(aligned: bool):
    """A device function that stores four neighbours of a row, the first `count` of them, at a flat index."""

    @cuda.jit(device=True)
    def store(preatt, at, count, x0, x1, x2, x3):
        count = int32(count)
        if aligned and count >= 4:
            store4_streaming(preatt, at, x0, x1, x2, x3)
        else:
            if count >= 1:
                preatt[uint64(at)] = x0
            if count >= 2:
                preatt[uint64(at + 1)] = x1
            if count >= 3:
                preatt[uint64(at + 2)] = x2
            if count >= 4:
                preatt[uint64(at + 3)] = x3

    return store


@functools.cache
def store_fp32(aligned: bool):
    """A device function that stores what multiply_fp32 has added up: a warp 128 bytes of each of four rows at once."""
    store = store_four(aligned)

    @cuda.jit(device=True)
    def store_sums(preatt, start, row, column, T, sums, scale, lane):
        y, x = lane_place(lane)
        row, column = int32(row + 4 * y), int32(column + 4 * x)
        at = start + int64(row) * T + column
        for i in range(8):
            more = i // 4 * 16 + i % 4
            left = int32(row - column + 1 + more if row + more < T else 0)  # from the first of four up to the diagonal
            for j in range(0, 8, 4):
                c = 8 * i + j
                store(
                    preatt, at + more * T + 8 * j, left - 8 * j,
                    sums[c] * scale, sums[c + 1] * scale, sums[c + 2] * scale, sums[c + 3] * scale,
                )  # fmt: skip

    return store_sums


@functools.cache
def store_tf32(aligned: bool):
    """A device function that stores what the engine's tensor_core has added up: of 16 x 16 elements lane 4 g + t has rows 2 g and
    2 g + 1 of columns 4 t to 4 t + 3."""
    store = store_four(aligned)
    M, N = TF32.WM // 8, TF32.WN // 8

    @cuda.jit(device=True)
    def store_sums(preatt, start, row, column, T, sums, scale, lane):
        row, column = int32(row + 2 * (lane >> 2)), int32(column + 4 * (lane & 3))
        at = start + int64(row) * T + column
        for i in range(M):
            more = i // 2 * 16 + i % 2
            left = int32(row - column + 1 + more if row + more < T else 0)
            for j in range(N // 2):
                c = (i // 2 * N + 2 * j) * 4 + 2 * (i % 2)
                store(
                    preatt, at + more * T + 16 * j, left - 16 * j,
                    sums[c] * scale, sums[c + 4] * scale, sums[c + 1] * scale, sums[c + 5] * scale,
                )  # fmt: skip

    return store_sums


@functools.cache
def tile_kernel(tile: Tile, tf32: bool, qkv_aligned: bool, preatt_aligned: bool):
    """The kernel of version 4, or with tf32 of version 5."""
    WM, WN, SUMS = tile.WM, tile.WN, tile.WM * tile.WN // 32
    ROWS, STAGE, WHOLE = TILE * BK, 2 * TILE * BK, BK // 4
    copy = copy_tile(False, TILE, tile.threads, qkv_aligned, True, 1, swizzle if tf32 else swizzle_fp32)
    multiply = multiply_tf32() if tf32 else multiply_fp32
    store_sums = store_tf32(preatt_aligned) if tf32 else store_fp32(preatt_aligned)

    @cuda.jit(fastmath=True, launch_bounds=(tile.threads, tile.blocks))
    def trimat_tile_kernel(preatt, qkv, NH, hs, T, scale):
        """preatt (B*NH*T*T,), qkv (B*T,3C)."""
        shared = cuda.shared.array(0, float32, alignment=16)  # two stages, each a tile of q and one of k
        sums = cuda.local.array(SUMS, float32)
        z, first_row, first_column = place_of(int32(cuda.blockIdx.x), T)
        if first_column > first_row:
            return
        lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
        warp_row, warp_column = warp // (TILE // WN) * WM, warp % (TILE // WN) * WN
        row, column = int32(first_row + warp_row), int32(first_column + warp_column)
        busy = row < T and column < T and column < row + WM  # else the warp's tile is no part of the triangle
        q, width = int32(z % NH * hs), int32(3 * NH * hs)
        k, b = int32(q + NH * hs), int32(z // NH * T)
        for i in range(SUMS):
            sums[i] = float32(0)
        for start in range(0, hs, 2 * BK):
            for step in range(2):
                c = start + step * BK
                copy(shared, step * STAGE, qkv, b + first_row, q + c, b + T, width, q + hs, 0)
                copy(shared, step * STAGE + ROWS, qkv, b + first_column, k + c, b + T, width, k + hs, 0)
                cp_async_commit()
            pieces = int32((hs - start + 3) // 4)
            cp_async_wait(1)
            cuda.syncthreads()
            if busy:
                multiply(sums, shared, 0, ROWS, warp_row, warp_column, lane, min(pieces, WHOLE))
            cp_async_wait(0)
            cuda.syncthreads()
            if busy and pieces > WHOLE:
                multiply(sums, shared, STAGE, STAGE + ROWS, warp_row, warp_column, lane, min(pieces - WHOLE, WHOLE))
            cuda.syncthreads()
        if busy:
            store_sums(preatt, int64(z) * T * T, row, column, T, sums, scale, lane)

    return trimat_tile_kernel


def launch_tiles(tile, preatt, qkv, NH, tf32, stream):
    Z, T, hs = sizes(preatt, qkv, NH)
    kernel = tile_kernel(tile, tf32, hs % 4 == 0 and is_aligned(qkv), is_aligned(preatt))
    launch = big_shared(kernel, tiles(Z, T), tile.threads, stream, tile.shared(False, False))
    scale = float32(1 / math.sqrt(hs))
    launch(preatt.reshape(-1), qkv.reshape(Z // NH * T, -1), int32(NH), int32(hs), int32(T), scale)


@trimat_forward.version(4, "16-byte shared reads without bank conflicts, cp.async, 16-byte stores", needs_cc=(8, 0))
def trimat_forward4(preatt, qkv, NH, *, stream=0):
    """As trimat_forward1. 64 KB of shared memory a block."""
    launch_tiles(FP32, preatt, qkv, NH, False, stream)


@trimat_forward.version(5, "the tensor cores", precision="tf32", needs_cc=(8, 0))
def trimat_forward5(preatt, qkv, NH, *, stream=0):
    """As trimat_forward4."""
    launch_tiles(TF32, preatt, qkv, NH, True, stream)
