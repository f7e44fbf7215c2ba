"""The engine of versions 8, 10 and 11: one kernel for all three products, with fp32 arithmetic or on the tensor cores in TF32.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K) or, if b_m_major, (K,N)

Each block makes a BM x BN tile of out, each of its warps a WM x WN tile of that, walking along K in steps of BK. While the
warps multiply one step, cp.async brings the next ones into shared memory; at the end of a tile these are the first steps of
the block's next tile. K-major tiles stand there as they came, a row 128 bytes, their 16-byte chunks swizzled; M-major ones
with padded rows: no read meets another in a bank.

On the tensor cores a lane's elements of a fragment lie 8 rows apart in the definition of mma.m16n8k8. But rows of a tile may
be dealt to lanes in any order, as long as the store knows of it. So lane 4 g + t takes the neighbours 2 g and 2 g + 1 of 16:
of an M-major tile it reads both at once, and of a row of out it has four neighbours, which it stores at once.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from kernels.device import (
    address,
    big_shared,
    ceil_div,
    cp_async4_zfill,
    cp_async16_zfill,
    cp_async_commit,
    cp_async_wait,
    cuda,
    float32,
    int32,
    int64,
    keep_compiled,
    ldmatrix_x4,
    load2,
    load4,
    mma_tf32,
    multiprocessors,
    scratch,
    shared_limit,
    store2,
    store4,
)  # fmt: skip
from kernels.gelu.gate import gelu_gate
from kernels.intrinsics import ptx

STORE, BIAS, BIAS_GELU, BIAS_RESIDUAL, SLOPE, ADD = range(6)  # what becomes of a tile of a @ b


@ptx(
    "{.reg .b32 x, y; mov.b32 x, $1; add.s32 y, x, 0x1000; max.s32 y, x, y; mov.b32 $0, y;}",
    returns=float32, takes=(float32,), pure=True,
)  # fmt: skip
def round_tf32(x):
    """x for a tensor core, which ignores the low 13 bits: half a unit of the last place that it sees is added, so that cutting
    off rounds to nearest. The max is for NaN, 0x7fffffff on a GPU, which would wrap round to zero. What cvt.rna.tf32 takes
    three instructions for, in one (VIADDMNMX on Hopper) or two."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32(bits if bits & 0x7FFFFFFF > 0x7F800000 else bits + 0x1000).view(np.float32)


@ptx("div.s32 $0, $1, $2;", returns=int32, takes=(int32, int32), pure=True)
def quotient(x, y):
    """x // y of two that are not negative, in 32 bits. Numba's own has 64, and is a function call."""
    return x // y


@ptx("add.f32 $0, $1, 0f00000000;", returns=float32, takes=(float32,), pure=True)
def moved(x):
    """x in another register: plus zero, which the compiler does not see through."""
    return x


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for."""

    BM: int = 128
    BN: int = 128
    WM: int = 64  # a multiple of 16
    WN: int = 64  # 32 or 64, on the tensor cores 48 as well
    stages: int = 3
    blocks: int = 2  # a multiprocessor holds
    tf32: bool = True
    flops: float = 1e12  # a second, of a multiprocessor of an H200: what tiles are chosen by

    @property
    def threads(self) -> int:
        return 32 * (self.BM // self.WM) * (self.BN // self.WN)

    def size(self, rows: int, m_major: bool) -> int:
        """Floats of one stage of an operand's tile."""
        if not self.tf32:
            return BK * (rows + PAD_FP32)
        return BK * (rows + PAD) if m_major else BK * rows

    def shared(self, a_m_major: bool, b_m_major: bool) -> int:
        """Bytes of shared memory a block."""
        return 4 * self.stages * (self.size(self.BM, a_m_major) + self.size(self.BN, b_m_major))


BK = 32  # floats: a row of a K-major tile is 128 bytes, all banks once
ROOT = math.sqrt(2 / math.pi)  # of GELU
PAD = 8  # floats between the rows of an M-major tile: lanes t = 0..3 read rows t, and must not meet in a bank
PAD_FP32 = 4  # with fp32 arithmetic it is the copies of 8 steps of 4 rows that must not


@cuda.jit(device=True, cache=True)
def swizzle(row, chunk):
    """Where a row of a K-major tile keeps its chunk of 16 bytes, of eight. Of every second row of 16 all have another place:
    what ldmatrix reads at once fills 32 banks."""
    return chunk ^ (row >> 1) & 7


@functools.cache
def copy_tile(m_major: bool, rows: int, threads: int, aligned: bool, tf32: bool, parts: int, swizzle=swizzle):
    """A device function that starts to copy a part, 0 to parts - 1, of a tile of an operand, `rows` rows from `first` on and BK
    steps from k on, to shared[at:]. Steps from `end` on become zero. Rows from `count` on repeat the last one, for nobody will
    store what comes of them: that is cheaper than to ask."""
    steps = 1 << (threads * 4 // rows).bit_length() - 1  # of an M-major tile a pass
    passes = BK // steps if m_major else rows * BK // 4 // threads if tf32 else rows * 8 // threads
    PITCH = rows + (PAD if tf32 else PAD_FP32)
    ROWS = threads // 8  # of a K-major tile a pass

    @cuda.jit(device=True)
    def copy_k_major(shared, to, source, first, k, count, K, end, i):
        """source: (count, K)."""
        thread = int32(cuda.threadIdx.x)
        row, chunk = thread >> 3, thread & 7
        step = int32(k + 4 * chunk)
        start = int64(min(int32(first + row + i * ROWS), int32(count - 1))) * K + step
        to = int32(to + (row + i * ROWS) * BK + 4 * swizzle(row + i * ROWS, chunk))
        if aligned:
            cp_async16_zfill(shared, to, source, start, step < end)
        else:
            for j in range(4):
                cp_async4_zfill(shared, to + j, source, start + j, int32(step + j) < end)

    @cuda.jit(device=True)
    def copy_m_major(shared, to, source, first, k, count, K, end, i):
        """source: (K, count)."""
        thread = int32(cuda.threadIdx.x)
        row, column = thread // (rows // 4) + i * steps, thread % (rows // 4) * 4
        step, to = int32(k + row), int32(to + row * PITCH + column)
        column = int32(first + column)
        if steps * rows == threads * 4 or thread < steps * rows // 4:
            if aligned:
                cp_async16_zfill(shared, to, source, int64(step) * count + min(column, int32(count - 4)), step < end)
            else:
                for j in range(4):
                    at = min(int32(column + j), int32(count - 1))
                    cp_async4_zfill(shared, to + j, source, int64(step) * count + at, step < end)

    @cuda.jit(device=True)
    def copy_transposed(shared, to, source, first, k, count, K, end, i):
        """source: (count, K), kept as if it were M-major: 4 bytes a copy. A warp's are 8 steps of 4 rows, in 32 banks."""
        thread = int32(cuda.threadIdx.x)
        row, step = int32((thread >> 3) + i * ROWS), thread & 7
        to = int32(to + step * PITCH + row)
        step = int32(k + step)
        start = int64(min(int32(first + row), int32(count - 1))) * K + step
        for j in range(0, BK, 8):
            cp_async4_zfill(shared, to + j * PITCH, source, start + j, int32(step + j) < end)

    copy_pass = copy_m_major if m_major else copy_k_major if tf32 else copy_transposed
    EACH, WHOLE = ceil_div(passes, parts), passes % parts == 0

    @cuda.jit(device=True)
    def copy_part(shared, at, source, first, k, count, K, end, part):
        for j in range(EACH):
            i = int32(j * parts + part)
            if WHOLE or i < passes:
                copy_pass(shared, at, source, first, k, count, K, end, i)

    return copy_part


@functools.cache
def finished_of(epilogue: int):
    """A device function: what becomes of a sum x, with its bias b and what stands in the extra array, e. (For BIAS_GELU: what
    stands before the GELU.)"""

    @cuda.jit(device=True)
    def finished(x, b, e):
        if epilogue == BIAS or epilogue == BIAS_GELU:
            return x + b
        if epilogue == BIAS_RESIDUAL:
            return e + (x + b)
        if epilogue == ADD:
            return e + x
        if epilogue == SLOPE:
            gate = gelu_gate(e)
            slope = float32(2 * ROOT) * (float32(1) + float32(3 * 0.044715) * e * e)
            return x * (gate + e * gate * (float32(1) - gate) * slope)
        return x

    return finished


@functools.cache
def epilogue_of(epilogue: int, width: int, aligned: bool):
    """Three device functions for `width` neighbours of a row: load the bias, load the extra array, finish and store.

    All loads of a tile come before its stores, or each would wait for the one before: the compiler cannot know that out is
    another array.
    """
    has_bias = epilogue in (BIAS, BIAS_GELU, BIAS_RESIDUAL)
    has_extra = epilogue in (BIAS_RESIDUAL, SLOPE, ADD)
    finished = finished_of(epilogue)

    @cuda.jit(device=True)
    def load_bias(b, i, bias, column, N):
        if has_bias and aligned and width == 4:
            if column < N:
                b[i], b[i + 1], b[i + 2], b[i + 3] = load4(bias, column)
        elif has_bias:
            for j in range(width):
                if column + j < N:
                    b[i + j] = bias[column + j]

    @cuda.jit(device=True)
    def load_extra(e, i, extra, row, column, rows, N):
        if has_extra and row < rows:
            if aligned and width == 4:
                if column < N:
                    e[i], e[i + 1], e[i + 2], e[i + 3] = load4(extra, int64(row) * N + column)
            else:
                for j in range(width):
                    if column + j < N:
                        e[i + j] = extra[row, column + j]

    @cuda.jit(device=True)
    def store(out, extra, row, column, rows, N, x, b, e):
        """x, b, e: tuples of `width`."""
        if row < rows and column < N:
            if aligned and width == 2:
                at = int64(row) * N + column
                y0, y1 = finished(x[0], b[0], e[0]), finished(x[1], b[1], e[1])
                if epilogue == BIAS_GELU:
                    store2(extra, at, y0, y1)
                    y0, y1 = y0 * gelu_gate(y0), y1 * gelu_gate(y1)
                store2(out, at, y0, y1)
            else:
                for j in range(width):
                    if column + j < N:
                        y = finished(x[j], b[j], e[j])
                        if epilogue == BIAS_GELU:
                            extra[row, column + j] = y
                            y *= gelu_gate(y)
                        out[row, column + j] = y

    @cuda.jit(device=True)
    def store_four(out, extra, row, column, rows, N, x, b, e):
        """The same for four. What is stored at once stands in four neighbouring registers; where sums are added up, an even and an
        odd one should be read at a time. So sums are moved before the store, and there is no branch around the arithmetic."""
        at, inside = int64(row) * N + column, row < rows and column < N
        y0, y1 = finished(moved(x[0]), b[0], e[0]), finished(moved(x[1]), b[1], e[1])
        y2, y3 = finished(moved(x[2]), b[2], e[2]), finished(moved(x[3]), b[3], e[3])
        if epilogue == BIAS_GELU:
            if inside:
                store4(extra, at, y0, y1, y2, y3)
            y0, y1, y2, y3 = y0 * gelu_gate(y0), y1 * gelu_gate(y1), y2 * gelu_gate(y2), y3 * gelu_gate(y3)
        if inside:
            store4(out, at, y0, y1, y2, y3)

    return load_bias, load_extra, store_four if aligned and width == 4 else store


@functools.cache
def read_fragment(m_major: bool, rows: int, W: int):
    """A device function: a warp's fragment of W rows from `first` on and 8 steps of K. Of every 16 rows a lane gets four elements:
    rows 2 g and 2 g + 1 of step t, and the same of step t + 4."""

    @cuda.jit(device=True)
    def read_k_major(fragment, shared, at, first, eighth, lane):
        row = int32((lane & 7) << 1 | lane >> 3 & 1)
        start = at + (first + row) * BK + 4 * swizzle(row, 2 * eighth + (lane >> 4))
        for i in range(0, W // 4, 4):
            x0, x1, x2, x3 = ldmatrix_x4(shared, start + 4 * i * BK)
            fragment[i], fragment[i + 1], fragment[i + 2], fragment[i + 3] = x0, x1, x2, x3

    @cuda.jit(device=True)
    def read_m_major(fragment, shared, at, first, eighth, lane):
        start = at + (8 * eighth + (lane & 3)) * (rows + PAD) + first + 2 * (lane >> 2)
        for i in range(0, W // 4, 4):
            x0, x1 = load2(shared, start + 4 * i)
            x2, x3 = load2(shared, start + 4 * i + 4 * (rows + PAD))
            fragment[i], fragment[i + 1], fragment[i + 2], fragment[i + 3] = x0, x1, x2, x3

    return read_m_major if m_major else read_k_major


@functools.cache
def tensor_core(tile: "Tile", a_m_major: bool, b_m_major: bool, epilogue: int, aligned: bool):
    """Four device functions of a warp on the tensor cores: read 8 steps of both operands, round what was read of b, multiply
    (which rounds a on the way, and the next b), and store a part of the sums."""
    WM, WN = tile.WM, tile.WN
    A, B, SIZE_E = WM // 4, WN // 4, WM // 4
    read_a, read_b = read_fragment(a_m_major, tile.BM, WM), read_fragment(b_m_major, tile.BN, WN)
    load_bias, load_extra, store = epilogue_of(epilogue, 4, aligned)

    @cuda.jit(device=True)
    def read(a, b, shared, at_a, at_b, row, column, first, k, lane):
        """The eighth of a step that comes k after the first."""
        read_a(a, shared, at_a, row, first + k, lane)
        read_b(b, shared, at_b, column, first + k, lane)

    @cuda.jit(device=True)
    def round_some(b, first, end):
        for k in range(first, end):
            b[k] = round_tf32(b[k])

    @cuda.jit(device=True)
    def round_b(b):
        round_some(b, 0, B)

    @cuda.jit(device=True)
    def multiply(sums, a, b, next_b):
        """Roundings stand between products: in a row they would keep the tensor core waiting."""
        for i in range(0, A, 4):
            a0, a1, a2, a3 = round_tf32(a[i]), round_tf32(a[i + 1]), round_tf32(a[i + 2]), round_tf32(a[i + 3])
            for j in range(WN // 8):
                c, k = i * (WN // 8) + 4 * j, j // 2 * 4 + j % 2
                sums[c], sums[c + 1], sums[c + 2], sums[c + 3] = mma_tf32(
                    sums[c], sums[c + 1], sums[c + 2], sums[c + 3], a0, a1, a2, a3, b[k], b[k + 2]
                )
            round_some(next_b, i * B // A, (i + 4) * B // A)

    @cuda.jit(device=True)
    def store_part(sums, part, out, bias, extra, row, column, rows, N, lane):
        """Of 16 columns the lane's four, of half of its rows."""
        b = cuda.local.array(4, float32)
        e = cuda.local.array(SIZE_E, float32)
        first, j = part % 2 * (WM // 16), part // 2
        row, n = row + 2 * (lane >> 2), column + 4 * (lane & 3) + 16 * j
        load_bias(b, 0, bias, n, N)
        for k in range(WM // 16):
            load_extra(e, 4 * k, extra, row + (first + k) // 2 * 16 + (first + k) % 2, n, rows, N)
        for k in range(WM // 16):
            c, i = ((first + k) // 2 * (WN // 8) + 2 * j) * 4 + (first + k) % 2 * 2, 4 * k
            store(
                out, extra, row + (first + k) // 2 * 16 + (first + k) % 2, n, rows, N,
                (sums[c], sums[c + 4], sums[c + 1], sums[c + 5]), (b[0], b[1], b[2], b[3]), (e[i], e[i + 1], e[i + 2], e[i + 3]),
            )  # fmt: skip

    return read, round_b, multiply, store_part


@functools.cache
def fp32_core(tile: "Tile", epilogue: int, aligned: bool):
    """The same four with fp32 arithmetic: lanes 4 x 8, each with its own rows and columns in fours; nothing is rounded."""
    A, B = tile.WM // 4, tile.WN // 8  # rows and columns of a lane
    A_ROW, B_ROW = tile.BM + PAD_FP32, tile.BN + PAD_FP32
    load_bias, load_extra, store = epilogue_of(epilogue, 4, aligned)

    @cuda.jit(device=True)
    def place(lane):
        """(y, x) of 4 x 8: a lane and its neighbour (number ^ 1) have the same y, it and number ^ 2 the same x. Where that is so
        a multiprocessor serves half a warp's reads of 16 bytes at once, else a quarter's."""
        return lane >> 1 & 1 | lane >> 3 & 2, lane & 1 | lane >> 1 & 6

    @cuda.jit(device=True)
    def read(a, b, shared, at_a, at_b, row, column, first, k, lane):
        """One of 32 steps, k after the first: a constant distance."""
        y, x = place(lane)
        at_a = int32(at_a + row + 4 * y + first * A_ROW) + k * A_ROW
        at_b = int32(at_b + column + 4 * x + first * B_ROW) + k * B_ROW
        for i in range(0, A, 4):
            a[i], a[i + 1], a[i + 2], a[i + 3] = load4(shared, at_a + 4 * i)
        for j in range(0, B, 4):
            b[j], b[j + 1], b[j + 2], b[j + 3] = load4(shared, at_b + 8 * j)

    @cuda.jit(device=True)
    def round_b(b):
        pass

    @cuda.jit(device=True)
    def multiply(sums, a, b, next_b):
        """Back and forth along b: an operand that the last multiply-add had too need not be read from its register again. The last
        of b, which is read last, comes first: what could begin without it the assembler would begin, and mix up the order."""
        for i in range(A):
            for k in range(B):
                j = k if i % 2 == 1 else B - 1 - k
                sums[i * B + j] += a[i] * b[j]

    @cuda.jit(device=True)
    def store_part(sums, part, out, bias, extra, row, column, rows, N, lane):
        """Four rows and four columns of the lane's."""
        b = cuda.local.array(4, float32)
        e = cuda.local.array(16, float32)
        y, x = place(lane)
        i, j = part // (B // 4) * 4, part % (B // 4) * 4
        row, n = row + 4 * y + 4 * i, column + 4 * x + 8 * j
        load_bias(b, 0, bias, n, N)
        for k in range(4):
            load_extra(e, 4 * k, extra, row + k, n, rows, N)
        for k in range(4):
            c = (i + k) * B + j
            store(
                out, extra, row + k, n, rows, N, (sums[c], sums[c + 1], sums[c + 2], sums[c + 3]),
                (b[0], b[1], b[2], b[3]), (e[4 * k], e[4 * k + 1], e[4 * k + 2], e[4 * k + 3]),
            )  # fmt: skip

    return read, round_b, multiply, store_part


GROUP = 8  # rows of tiles that blocks walk along together, so that L2 serves them


@functools.cache
def kernel(tile: Tile, a_m_major: bool, b_m_major: bool, a_aligned: bool, b_aligned: bool, epilogue: int, out_aligned: bool):
    BM, BN, WM, WN, STAGES, TF32 = tile.BM, tile.BN, tile.WM, tile.WN, tile.stages, tile.tf32
    A_SIZE, STAGE = tile.size(BM, a_m_major), tile.size(BM, a_m_major) + tile.size(BN, b_m_major)
    SUMS, AHEAD = WM * WN // 32, STAGES - 2
    if TF32:  # a step of BK is multiplied in SLICES, UNROLL of them in a row, and copied in PARTS
        A, B, SLICES, UNROLL, PARTS, STORES = WM // 4, WN // 4, BK // 8, 4, 4, WN // 8
        read, round_b, multiply, store_part = tensor_core(tile, a_m_major, b_m_major, epilogue, out_aligned)
    else:
        A, B, SLICES, UNROLL, PARTS, STORES = WM // 4, WN // 8, BK, 8, 8, SUMS // 16
        read, round_b, multiply, store_part = fp32_core(tile, epilogue, out_aligned)
    EACH = PARTS * UNROLL // SLICES
    COPY_PARTS = 1 if a_m_major and b_m_major and not TF32 else PARTS  # few copies, of 16 bytes: the first part has them all
    copy_a = copy_tile(a_m_major, BM, tile.threads, a_aligned, TF32, COPY_PARTS)
    copy_b = copy_tile(b_m_major, BN, tile.threads, b_aligned, TF32, COPY_PARTS)

    @cuda.jit(device=True)
    def locate(item, M, N, K, share, longer):
        """Of this item of work: the first row and column of its tile, where in K it begins, and where it ends. After the last
        item: a place where there is nothing to copy."""
        across, down = quotient(N + BN - 1, BN), quotient(M + BM - 1, BM)
        part = quotient(item, across * down)
        tile = int32(item - part * across * down)
        group = quotient(tile, GROUP * across)
        tile = int32(tile - group * GROUP * across)
        height = min(int32(down - group * GROUP), int32(GROUP))
        column = quotient(tile, height)
        row = int32(group * GROUP + tile - column * height)
        start = int32((part * share + min(part, longer)) * BK)
        end = int32(start + (share + (part < longer)) * BK)
        return int32(row * BM), int32(column * BN), start, min(end, max(start, int32(K)))

    @cuda.jit(device=True)
    def copy(shared, stage, a, b, where, M, N, K, part):
        """A part of a step's copies."""
        row, column, k, end = where
        if COPY_PARTS > 1 or part == 0:
            copy_a(shared, stage, a, row, k, M, K, end, part)
            copy_b(shared, int32(stage + A_SIZE), b, column, k, N, K, end, part)

    @cuda.jit(device=True)
    def step_on(item, where, M, N, K, share, longer):
        """The copies' item, and where in it, a step later."""
        row, column, k, end = where
        k = int32(k + BK)
        if k < end:
            return item, (row, column, k, end)
        item = int32(item + cuda.gridDim.x)
        return item, locate(item, M, N, K, share, longer)

    @cuda.jit(device=True)
    def slice_on(sums, a, b, next_a, next_b, shared, now, row, column, s, k, lane):
        """Read slice s + k, and multiply the one before."""
        read(next_a, next_b, shared, now, now + A_SIZE, row, column, s, k, lane)
        multiply(sums, a, b, next_b)

    @cuda.jit(device=True)
    def store_sums(sums, out, bias, extra, row, column, rows, N, lane):
        """Written out: the compiler might not unroll a loop, and then the sums would have to leave their registers."""
        store_part(sums, 0, out, bias, extra, row, column, rows, N, lane)
        store_part(sums, 1, out, bias, extra, row, column, rows, N, lane)
        if STORES > 2:
            store_part(sums, 2, out, bias, extra, row, column, rows, N, lane)
            store_part(sums, 3, out, bias, extra, row, column, rows, N, lane)
        if STORES > 4:
            store_part(sums, 4, out, bias, extra, row, column, rows, N, lane)
            store_part(sums, 5, out, bias, extra, row, column, rows, N, lane)
        if STORES > 6:
            store_part(sums, 6, out, bias, extra, row, column, rows, N, lane)
            store_part(sums, 7, out, bias, extra, row, column, rows, N, lane)

    @cuda.jit(fastmath=True, launch_bounds=(tile.threads, tile.blocks))
    def matmul_kernel(out, a, b, bias, extra, M, N, K, share, longer, items, tiles):
        """out (M,N), or (splits * M, N), one below the other for each part of K. An item of work is a tile of out and `share` steps
        of K, or one more in the first `longer` parts. The copies are STAGES - 1 steps ahead, across the borders of items too."""
        shared = cuda.shared.array(0, float32, alignment=16)
        sums = cuda.local.array(SUMS, float32)
        a0 = cuda.local.array(A, float32)  # two fragments of each operand: the one is read while the other is multiplied
        b0 = cuda.local.array(B, float32)
        a1 = cuda.local.array(A, float32)
        b1 = cuda.local.array(B, float32)
        lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
        x, y = int32(warp % (BN // WN) * WN), int32(warp // (BN // WN) * WM)  # where the warp's part of the tile begins
        item_ahead = int32(cuda.blockIdx.x)
        ahead = locate(item_ahead, M, N, K, share, longer)
        for stage in range(STAGES - 1):
            for part in range(PARTS):
                copy(shared, int32(stage * STAGE), a, b, ahead, M, N, K, int32(part))
            cp_async_commit()
            item_ahead, ahead = step_on(item_ahead, ahead, M, N, K, share, longer)
        now, next = int32(0), int32((STAGES - 1) * STAGE)
        cp_async_wait(AHEAD)
        cuda.syncthreads()
        read(a0, b0, shared, now, now + A_SIZE, y, x, int32(0), 0, lane)
        round_b(b0)
        for item in range(int32(cuda.blockIdx.x), items, int32(cuda.gridDim.x)):
            row, column, start, end = locate(item, M, N, K, share, longer)
            for i in range(SUMS):
                sums[i] = float32(0)
            for _ in range(start, end, int32(BK)):
                for s in range(int32(0), int32(SLICES), int32(UNROLL)):
                    part = int32(s // UNROLL * EACH)
                    copy(shared, next, a, b, ahead, M, N, K, part)
                    slice_on(sums, a0, b0, a1, b1, shared, now, y, x, s, 1, lane)
                    if TF32:
                        copy(shared, next, a, b, ahead, M, N, K, int32(part + 1))
                    slice_on(sums, a1, b1, a0, b0, shared, now, y, x, s, 2, lane)
                    if not TF32:
                        slice_on(sums, a0, b0, a1, b1, shared, now, y, x, s, 3, lane)
                        slice_on(sums, a1, b1, a0, b0, shared, now, y, x, s, 4, lane)
                        slice_on(sums, a0, b0, a1, b1, shared, now, y, x, s, 5, lane)
                        slice_on(sums, a1, b1, a0, b0, shared, now, y, x, s, 6, lane)
                    copy(shared, next, a, b, ahead, M, N, K, int32(part + EACH // 2))
                    slice_on(sums, a0, b0, a1, b1, shared, now, y, x, s, UNROLL - 1, lane)
                    if TF32:
                        copy(shared, next, a, b, ahead, M, N, K, int32(part + 3))
                    if s == SLICES - UNROLL:  # the step is over but for its last slice, which is in registers
                        cp_async_commit()
                        item_ahead, ahead = step_on(item_ahead, ahead, M, N, K, share, longer)
                        next = now
                        now = int32(now + STAGE if now < (STAGES - 1) * STAGE else 0)
                        cp_async_wait(AHEAD)
                        cuda.syncthreads()
                        read(a0, b0, shared, now, now + A_SIZE, y, x, int32(0), 0, lane)
                    else:
                        read(a0, b0, shared, now, now + A_SIZE, y, x, s, UNROLL, lane)
                    multiply(sums, a1, b1, b0)
            part = quotient(item, tiles) * M
            store_sums(sums, out, bias, extra, part + row + y, column + x, part + M, N, lane)

    return keep_compiled(matmul_kernel, tile, a_m_major, b_m_major, a_aligned, b_aligned, epilogue, out_aligned)


@functools.cache
def add_splits(epilogue: int, aligned: bool):
    width = 4 if aligned else 1
    load_bias, load_extra, store = epilogue_of(epilogue, width, aligned)

    @cuda.jit(fastmath=True)
    def add_splits_kernel(out, parts, bias, extra, M, N, splits):
        """out (M,N) = the sum of parts (splits * M, N), in their order, finished. A thread four columns, or one if not aligned."""
        x = cuda.local.array(4, float32)
        b = cuda.local.array(4, float32)
        e = cuda.local.array(4, float32)
        index, columns = int32(cuda.grid(1)), quotient(N, width)
        row = quotient(index, columns)
        column = int32((index - row * columns) * width)
        if row < M:
            load_bias(b, 0, bias, column, N)
            load_extra(e, 0, extra, row, column, M, N)
            for j in range(width):
                x[j] = float32(0)
            for split in range(splits):
                if aligned:
                    y0, y1, y2, y3 = load4(parts, (int64(split) * M + row) * N + column)
                    x[0], x[1], x[2], x[3] = x[0] + y0, x[1] + y1, x[2] + y2, x[3] + y3
                else:
                    x[0] += parts[split * M + row, column]
            store(out, extra, row, column, M, N, (x[0], x[1], x[2], x[3]), (b[0], b[1], b[2], b[3]), (e[0], e[1], e[2], e[3]))

    return keep_compiled(add_splits_kernel, epilogue, aligned)


def best_splits(
    M: int, N: int, K: int, BM: int, BN: int, flops: float, blocks: int = 1, most: int = 8
) -> tuple[float, int]:
    """(seconds, splits): into how many parts to split K so that all multiprocessors have their share of the work, where one of
    them, with `blocks` blocks, does `flops` a second and adding the parts up moves them at 3 TB/s. On another card the ratio
    is much the same."""
    tiles, places = ceil_div(M, BM) * ceil_div(N, BN), blocks * multiprocessors()

    def seconds(splits):
        work = blocks * ceil_div(tiles * splits, places) * 2 * BM * BN * K / splits / flops
        return work + (splits > 1) * (3e-6 + (2 * splits + 1) * 4 * M * N / 3e12)

    return min((seconds(splits), splits) for splits in range(1, most + 1) if splits == 1 or K >= splits * 4 * BK)


# The tiles to choose from, the small one last. A number of columns for which the large tiles leave the last round of blocks half
# empty often suits the next.
TF32_TILES = (
    Tile(256, 128, stages=4, blocks=1, flops=1.7e12),
    Tile(256, 96, WN=48, stages=4, blocks=1, flops=1.5e12),
    Tile(128, 128, flops=1.5e12),
    Tile(64, 64, 32, 32, blocks=4),
)  # fmt: skip
FP32_TILES = (
    Tile(128, 128, tf32=False, flops=0.40e12),
    Tile(96, 128, WM=48, tf32=False, flops=0.36e12),
    Tile(64, 64, 32, 32, blocks=4, tf32=False),
)  # fmt: skip


def choose(M: int, N: int, K: int, a_m_major: bool, b_m_major: bool, tf32: bool) -> tuple[Tile, int]:
    """The tile, and into how many parts to split K: what takes the least time, of what fits into shared memory."""
    *tiles, small = TF32_TILES if tf32 else FP32_TILES
    fitting = [tile for tile in tiles if tile.shared(a_m_major, b_m_major) <= shared_limit()]
    if M * N <= 128 * 128 or not fitting:
        return small, 1
    times = {tile: best_splits(M, N, K, tile.BM, tile.BN, tile.flops, tile.blocks, 12) for tile in fitting}
    tile = min(times, key=times.get)
    return tile, times[tile][1]


def is_aligned(*arrays) -> bool:
    """Whether each starts at a multiple of 16 bytes and, if it has rows, each of these does."""
    return all(address(a) % 16 == 0 and a.shape[-1] % 4 == 0 for a in arrays)


def multiply(
    out, a, b, *, a_m_major=False, b_m_major=False, epilogue=STORE, bias=None, extra=None,
    tf32=True, tile=None, splits=None, stream=0,
):  # fmt: skip
    """out (M,N) = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b is (N,K), or (K,N) if b_m_major. bias: (N,); extra:
    (M,N), what the epilogue reads or writes."""
    M, N = out.shape
    K = a.shape[0] if a_m_major else a.shape[1]
    chosen, parts = choose(M, N, K, a_m_major, b_m_major, tf32)
    tile = tile or chosen
    steps = ceil_div(K, BK)
    splits = min(splits or parts, steps)
    share, longer = divmod(steps, splits)
    bias, extra = out if bias is None else bias, out if extra is None else extra
    aligned = is_aligned(out, extra) and is_aligned(bias)
    target, how = (out, (epilogue, aligned)) if splits == 1 else (scratch("matmul parts", (splits * M, N)), (STORE, N % 4 == 0))
    run = kernel(tile, a_m_major, b_m_major, is_aligned(a), is_aligned(b), *how)
    tiles = ceil_div(M, tile.BM) * ceil_div(N, tile.BN)
    items = tiles * splits
    grid = min(items, tile.blocks * multiprocessors())
    launch = big_shared(run, grid, tile.threads, stream, tile.shared(a_m_major, b_m_major))
    launch(target, a, b, bias, extra, *map(int32, (M, N, K, share, longer, items, tiles)))
    if splits > 1:
        threads = M * N // 4 if aligned else M * N
        grid = ceil_div(threads, 256)
        add_splits(epilogue, aligned)[grid, 256, stream](out, target, bias, extra, int32(M), int32(N), int32(splits))
