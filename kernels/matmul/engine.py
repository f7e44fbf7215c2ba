"""The engine of versions 8, 10 and 11: one kernel for all three products, with fp32 arithmetic or on the tensor cores in TF32.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K) or, if b_m_major, (K,N)

Each block makes a BM x BN tile of out, each of its warps a WM x WN tile of that, walking along K in steps of BK. While the
warps multiply one step, cp.async brings the next ones into shared memory. K-major tiles stand there as they came, a row 128
bytes, their 16-byte chunks swizzled; M-major ones with rows padded by 32 bytes: no read meets another in a bank.

A lane's elements of a fragment lie K apart or M apart in the definition of mma.m16n8k8. But a sum may be taken in any
order, and rows of a tile may be dealt to lanes in any order, as long as a and b agree on the first and the store knows of
the second. So lane 4 g + t takes, of 8 steps along K, the neighbouring 2 t and 2 t + 1, and of 32 rows the neighbouring
4 g to 4 g + 3: it reads 8 bytes at a time of a K-major tile, 16 of an M-major one, and stores 16 of a row of out.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from kernels.device import (
    big_shared,
    ceil_div,
    cp_async4,
    cp_async4_zfill,
    cp_async16,
    cp_async16_zfill,
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
    mma_tf32,
    multiprocessors,
    rcp_approx,
    scratch,
    store2,
    store4,
)  # fmt: skip
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


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for."""

    BM: int = 128
    BN: int = 128
    WM: int = 64  # a multiple of 32 (64 with fp32 arithmetic)
    WN: int = 64  # 32 or 64
    stages: int = 3
    blocks: int = 2  # a multiprocessor holds
    tf32: bool = True

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
GATE = -2 * ROOT * math.log2(math.e)
PAD = 8  # floats between the rows of an M-major tile: lanes t = 0..3 read rows 0..3, and must not meet in a bank
PAD_FP32 = 4  # with fp32 arithmetic it is the copies of 8 steps of 4 rows that must not



@cuda.jit(device=True, cache=True)
def swizzle(g, chunk):
    """Where a row of a K-major tile keeps its chunk of 16 bytes, of eight; g: the row's number // 4, of which bits 0 to 2
    count. The pairs of chunks that four neighbouring g keep are four different ones: what 16 lanes read fills 32 banks."""
    return chunk ^ ((g & 3) << 1 | (g >> 2) & 1)


@cuda.jit(device=True, cache=True)
def in_tile(step):
    """The row of an M-major tile for a step of K: 2 t + j of each 8 goes to t + 4 j."""
    return step & 24 | (step & 1) << 2 | (step >> 1) & 3


@functools.cache
def copy_tile(m_major: bool, rows: int, threads: int, aligned: bool, tf32: bool):
    """A device function that starts to copy a tile of an operand, `rows` rows from `first` on and BK steps from k on, to
    shared[at:]. What lies outside of the operand becomes zero; where nothing does, no copy has to ask."""
    steps = threads * 4 // rows  # of an M-major tile a pass
    passes = rows * BK // 4 // threads
    PITCH = rows + (PAD if tf32 else PAD_FP32)

    @cuda.jit(device=True)
    def copy16(shared, to, source, start, valid, inside):
        if inside:
            cp_async16(shared, to, source, start)
        else:
            cp_async16_zfill(shared, to, source, start, valid)

    @cuda.jit(device=True)
    def copy_k_major(shared, at, source, first, k, count, K, end):
        """source: (count, K). A thread's rows share their g, so that its places in shared memory differ by constants."""
        thread = int32(cuda.threadIdx.x)
        g, chunk = thread >> 3, thread & 7
        row = (g & 7) * 4 + (g >> 3) * 32
        to = at + row * BK + 4 * swizzle(g, chunk)
        start = int64(first + row) * K + (k + 4 * chunk)
        inside = aligned and first + rows <= count and k + BK <= end
        for i in range(passes):
            more = i % 4 + i // 4 * (threads // 2)
            valid = first + row + more < count and k + 4 * chunk < end
            if aligned:
                copy16(shared, to + more * BK, source, start + more * K, valid, inside)
            else:
                for j in range(4):
                    valid = first + row + more < count and k + 4 * chunk + j < end
                    cp_async4_zfill(shared, to + more * BK + j, source, start + more * K + j, valid)

    @cuda.jit(device=True)
    def copy_m_major(shared, at, source, first, k, count, K, end):
        """source: (K, count)."""
        thread = int32(cuda.threadIdx.x)
        step, column = thread // (rows // 4), thread % (rows // 4) * 4
        to = at + (in_tile(step) if tf32 else step) * PITCH + column
        start = int64(k + step) * count + (first + column)
        inside = aligned and first + rows <= count and k + BK <= end
        for i in range(passes):
            more = i * steps
            row = (in_tile(more) if tf32 else more) * PITCH
            if aligned:
                valid = k + step + more < end and first + column < count
                copy16(shared, to + row, source, start + more * count, valid, inside)
            else:
                for j in range(4):
                    valid = k + step + more < end and first + column + j < count
                    cp_async4_zfill(shared, to + row + j, source, start + more * count + j, valid)

    @cuda.jit(device=True)
    def copy_transposed(shared, at, source, first, k, count, K, end):
        """source: (count, K), kept as if it were M-major: 4 bytes a copy. A warp's are 8 steps of 4 rows, in 32 banks."""
        thread = int32(cuda.threadIdx.x)
        row, step = thread >> 3, thread & 7
        to = at + step * PITCH + row
        start = int64(first + row) * K + (k + step)
        inside = first + rows <= count and k + BK <= end
        for i in range(0, rows, threads // 8):
            for j in range(0, BK, 8):
                if inside:
                    cp_async4(shared, to + j * PITCH + i, source, start + i * K + j)
                else:
                    valid = first + row + i < count and k + step + j < end
                    cp_async4_zfill(shared, to + j * PITCH + i, source, start + i * K + j, valid)

    return copy_m_major if m_major else copy_k_major if tf32 else copy_transposed


@cuda.jit(device=True, cache=True)
def gelu_gate(x):
    """0.5 * (1 + tanh(u)) is the logistic function of 2 u, with u = sqrt(2/pi) * (x + 0.044715 x^3). The exponential is taken as
    a power of two: seven instructions, where exp has to cut its argument into two parts first."""
    return rcp_approx(float32(1) + exp2_approx(x * (float32(GATE) + float32(GATE * 0.044715) * x * x)))


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
            if aligned and width == 4:
                at = int64(row) * N + column
                y0, y1, y2, y3 = (
                    finished(x[0], b[0], e[0]), finished(x[1], b[1], e[1]), finished(x[2], b[2], e[2]), finished(x[3], b[3], e[3])
                )  # fmt: skip
                if epilogue == BIAS_GELU:
                    store4(extra, at, y0, y1, y2, y3)
                    y0, y1, y2, y3 = y0 * gelu_gate(y0), y1 * gelu_gate(y1), y2 * gelu_gate(y2), y3 * gelu_gate(y3)
                store4(out, at, y0, y1, y2, y3)
            elif aligned and width == 2:
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

    return load_bias, load_extra, store


@functools.cache
def read_fragment(m_major: bool, rows: int, W: int):
    """A device function: a warp's fragment of W rows from `first` on and 8 steps of K, rounded: fragment[2 * slot + step]."""

    @cuda.jit(device=True)
    def read_k_major(fragment, shared, at, first, eighth, g, t):
        start = at + (first + 4 * g) * BK + 4 * swizzle(g, 2 * eighth + (t >> 1)) + 2 * (t & 1)
        for i in range(W // 8):
            x0, x1 = load2(shared, start + (i // 4 * 32 + i % 4) * BK)
            fragment[2 * i] = round_tf32(x0)
            fragment[2 * i + 1] = round_tf32(x1)

    @cuda.jit(device=True)
    def read_m_major(fragment, shared, at, first, eighth, g, t):
        start = at + (8 * eighth + t) * (rows + PAD) + first + 4 * g
        for i in range(W // 32):
            for j in range(2):
                x0, x1, x2, x3 = load4(shared, start + 4 * j * (rows + PAD) + 32 * i)
                fragment[8 * i + j] = round_tf32(x0)
                fragment[8 * i + j + 2] = round_tf32(x1)
                fragment[8 * i + j + 4] = round_tf32(x2)
                fragment[8 * i + j + 6] = round_tf32(x3)

    return read_m_major if m_major else read_k_major


@functools.cache
def tensor_core(tile: "Tile", a_m_major: bool, b_m_major: bool, epilogue: int, aligned: bool):
    """The two device functions of a warp on the tensor cores: multiply a step of BK, and store the sums."""
    WM, WN = tile.WM, tile.WN
    read_a, read_b = read_fragment(a_m_major, tile.BM, WM), read_fragment(b_m_major, tile.BN, WN)
    SIZE_A, SIZE_B, SIZE_E = WM // 4, WN // 4, WM // 2
    load_bias, load_extra, store = epilogue_of(epilogue, 4, aligned)

    @cuda.jit(device=True)
    def multiply_eighth(sums, a, b):
        for i in range(WM // 16):
            for j in range(WN // 8):
                c = (i * (WN // 8) + j) * 4
                sums[c], sums[c + 1], sums[c + 2], sums[c + 3] = mma_tf32(
                    sums[c], sums[c + 1], sums[c + 2], sums[c + 3],
                    a[4 * i], a[4 * i + 2], a[4 * i + 1], a[4 * i + 3], b[2 * j], b[2 * j + 1],
                )  # fmt: skip

    @cuda.jit(device=True)
    def multiply_step(sums, shared, at_a, at_b, row, column, lane):
        """Two fragments of each operand by turns: the one is loaded while the other is multiplied."""
        a0 = cuda.local.array(SIZE_A, float32)
        a1 = cuda.local.array(SIZE_A, float32)
        b0 = cuda.local.array(SIZE_B, float32)
        b1 = cuda.local.array(SIZE_B, float32)
        g, t = lane >> 2, lane & 3
        read_a(a0, shared, at_a, row, 0, g, t)
        read_b(b0, shared, at_b, column, 0, g, t)
        read_a(a1, shared, at_a, row, 1, g, t)
        read_b(b1, shared, at_b, column, 1, g, t)
        multiply_eighth(sums, a0, b0)
        read_a(a0, shared, at_a, row, 2, g, t)
        read_b(b0, shared, at_b, column, 2, g, t)
        multiply_eighth(sums, a1, b1)
        read_a(a1, shared, at_a, row, 3, g, t)
        read_b(b1, shared, at_b, column, 3, g, t)
        multiply_eighth(sums, a0, b0)
        multiply_eighth(sums, a1, b1)

    @cuda.jit(device=True)
    def store_fours(sums, j, out, bias, extra, row, column, rows, N, lane):
        """Of each of the lane's rows, four of its eight columns of 32."""
        b = cuda.local.array(4, float32)
        e = cuda.local.array(SIZE_E, float32)
        row, n = row + (lane >> 2) * 4, column + (lane & 3) * 8 + 32 * (j // 2) + 4 * (j % 2)
        load_bias(b, 0, bias, n, N)
        for i in range(WM // 8):
            load_extra(e, 4 * i, extra, row + 32 * (i // 4) + i % 4, n, rows, N)
        for i in range(WM // 8):
            c, k = (i // 2 * (WN // 8) + 4 * (j // 2)) * 4 + 2 * (i % 2) + j % 2, 4 * i
            store(
                out, extra, row + 32 * (i // 4) + i % 4, n, rows, N, (sums[c], sums[c + 4], sums[c + 8], sums[c + 12]),
                (b[0], b[1], b[2], b[3]), (e[k], e[k + 1], e[k + 2], e[k + 3]),
            )  # fmt: skip

    return multiply_step, store_fours


@functools.cache
def fp32_core(tile: "Tile", epilogue: int, aligned: bool):
    """The two device functions of a warp with fp32 arithmetic: lanes 8 x 4, each with its own rows and columns in fours."""
    TM, TN = tile.WM // 8, tile.WN // 4
    A_ROW, B_ROW, SIZE_E = tile.BM + PAD_FP32, tile.BN + PAD_FP32, 4 * TM
    load_bias, load_extra, store = epilogue_of(epilogue, 4, aligned)

    @cuda.jit(device=True)
    def read(a, b, shared, at_a, at_b):
        for i in range(0, TM, 4):
            a[i], a[i + 1], a[i + 2], a[i + 3] = load4(shared, at_a + 8 * i)
        for j in range(0, TN, 4):
            b[j], b[j + 1], b[j + 2], b[j + 3] = load4(shared, at_b + 4 * j)

    @cuda.jit(device=True)
    def add_products(sums, a, b):
        for i in range(TM):
            for j in range(TN):
                sums[i * TN + j] += a[i] * b[j]

    @cuda.jit(device=True)
    def two_steps(sums, a0, b0, a1, b1, shared, at_a, at_b):
        """From the first step's elements in a0 and b0 to the third's: the one is read while the other is multiplied."""
        read(a1, b1, shared, at_a + A_ROW, at_b + B_ROW)
        add_products(sums, a0, b0)
        read(a0, b0, shared, at_a + 2 * A_ROW, at_b + 2 * B_ROW)
        add_products(sums, a1, b1)

    @cuda.jit(device=True)
    def multiply_step(sums, shared, at_a, at_b, row, column, lane):
        a0 = cuda.local.array(TM, float32)
        a1 = cuda.local.array(TM, float32)
        b0 = cuda.local.array(TN, float32)
        b1 = cuda.local.array(TN, float32)
        at_a += row + (lane >> 2) * 4
        at_b += column + (lane & 3) * 4
        for _ in range(BK // 8):
            read(a0, b0, shared, at_a, at_b)
            two_steps(sums, a0, b0, a1, b1, shared, at_a, at_b)
            two_steps(sums, a0, b0, a1, b1, shared, at_a + 2 * A_ROW, at_b + 2 * B_ROW)
            two_steps(sums, a0, b0, a1, b1, shared, at_a + 4 * A_ROW, at_b + 4 * B_ROW)
            read(a1, b1, shared, at_a + 7 * A_ROW, at_b + 7 * B_ROW)
            add_products(sums, a0, b0)
            add_products(sums, a1, b1)
            at_a += 8 * A_ROW
            at_b += 8 * B_ROW

    @cuda.jit(device=True)
    def store_fours(sums, j, out, bias, extra, row, column, rows, N, lane):
        """Of each of the lane's rows, four columns."""
        b = cuda.local.array(4, float32)
        e = cuda.local.array(SIZE_E, float32)
        row, n = row + (lane >> 2) * 4, column + (lane & 3) * 4 + 16 * j
        load_bias(b, 0, bias, n, N)
        for i in range(TM):
            load_extra(e, 4 * i, extra, row + i // 4 * 32 + i % 4, n, rows, N)
        for i in range(TM):
            c, k = i * TN + 4 * j, 4 * i
            store(
                out, extra, row + i // 4 * 32 + i % 4, n, rows, N, (sums[c], sums[c + 1], sums[c + 2], sums[c + 3]),
                (b[0], b[1], b[2], b[3]), (e[k], e[k + 1], e[k + 2], e[k + 3]),
            )  # fmt: skip

    return multiply_step, store_fours


GROUP = 8  # rows of blocks that walk along N together, so that L2 serves them


@functools.cache
def kernel(tile: Tile, a_m_major: bool, b_m_major: bool, a_aligned: bool, b_aligned: bool, epilogue: int, out_aligned: bool):
    BM, BN, WM, WN, STAGES = tile.BM, tile.BN, tile.WM, tile.WN, tile.stages
    A_SIZE, STAGE = tile.size(BM, a_m_major), tile.size(BM, a_m_major) + tile.size(BN, b_m_major)
    SUMS, AHEAD = WM * WN // 32, STAGES - 2
    copy_a = copy_tile(a_m_major, BM, tile.threads, a_aligned, tile.tf32)
    copy_b = copy_tile(b_m_major, BN, tile.threads, b_aligned, tile.tf32)
    if tile.tf32:
        multiply_step, store_fours = tensor_core(tile, a_m_major, b_m_major, epilogue, out_aligned)
    else:
        multiply_step, store_fours = fp32_core(tile, epilogue, out_aligned)

    @cuda.jit(fastmath=True, launch_bounds=(tile.threads, tile.blocks))
    def matmul_kernel(out, a, b, bias, extra, M, N, K, share):
        """out (M,N), or (splits * M, N): block (x, y) adds up `share` steps of K from y * share on."""
        shared = cuda.shared.array(0, float32, alignment=16)
        sums = cuda.local.array(SUMS, float32)
        for i in range(SUMS):
            sums[i] = float32(0)
        lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
        warp_row, warp_column = warp // (BN // WN) * WM, warp % (BN // WN) * WN
        block, split = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
        across = (N + int32(BN - 1)) // int32(BN)
        top = block // (GROUP * across) * GROUP
        height = min((M + int32(BM - 1)) // int32(BM) - top, GROUP)
        first_row = (top + block % (GROUP * across) % height) * BM
        first_column = block % (GROUP * across) // height * BN

        start = split * share
        end = min(start + share, K)
        for stage in range(STAGES - 1):
            copy_a(shared, stage * STAGE, a, first_row, start + stage * BK, M, K, end)
            copy_b(shared, stage * STAGE + A_SIZE, b, first_column, start + stage * BK, N, K, end)
            cp_async_commit()
        now, next = int32(0), int32((STAGES - 1) * STAGE)
        for k in range(start, end, int32(BK)):
            cp_async_wait(AHEAD)
            cuda.syncthreads()
            copy_a(shared, next, a, first_row, k + (STAGES - 1) * BK, M, K, end)
            copy_b(shared, next + A_SIZE, b, first_column, k + (STAGES - 1) * BK, N, K, end)
            cp_async_commit()
            multiply_step(sums, shared, now, now + A_SIZE, warp_row, warp_column, lane)
            next = now
            now = now + STAGE if now < (STAGES - 1) * STAGE else 0
        row, column, rows = split * M + first_row + warp_row, first_column + warp_column, (split + 1) * M
        store_fours(sums, 0, out, bias, extra, row, column, rows, N, lane)  # no loop: the compiler might not unroll it, and
        store_fours(sums, 1, out, bias, extra, row, column, rows, N, lane)  # then the sums would have to leave their registers
        if WN == 64:
            store_fours(sums, 2, out, bias, extra, row, column, rows, N, lane)
            store_fours(sums, 3, out, bias, extra, row, column, rows, N, lane)

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
        index = cuda.grid(1)
        row, column = index // (N // width), index % (N // width) * width
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


def best_splits(M: int, N: int, K: int, BM: int, BN: int, flops: float) -> tuple[float, int]:
    """(seconds, splits): into how many parts to split K so that all multiprocessors have their share of the work, where one of
    them does `flops` a second and adding the parts up moves them at 3 TB/s. On another card the ratio is much the same."""
    blocks, places = ceil_div(M, BM) * ceil_div(N, BN), multiprocessors()

    def seconds(splits):
        work = ceil_div(blocks * splits, places) * 2 * BM * BN * K / splits / flops
        return work + (splits > 1) * (3e-6 + (2 * splits + 1) * 4 * M * N / 3e12)

    return min((seconds(splits), splits) for splits in range(1, 9) if splits == 1 or K >= splits * 4 * BK)


FP32, TF32, SMALL, SMALL_FP32 = (
    Tile(128, 128, 64, 32, 3, 2, tf32=False), Tile(), Tile(64, 64, 32, 32, 3, 4), Tile(64, 64, 64, 32, 3, 4, tf32=False)
)  # fmt: skip


def choose(M: int, N: int, K: int, tf32: bool) -> tuple[Tile, int]:
    """The tile, and into how many parts to split K."""
    if M * N <= 128 * 128:
        return SMALL if tf32 else SMALL_FP32, 1
    tile = TF32 if tf32 else FP32
    return tile, best_splits(M, N, K, tile.BM, tile.BN, 1.2e12 if tf32 else 0.36e12)[1]


def is_aligned(*arrays) -> bool:
    """Whether each starts at a multiple of 16 bytes and, if it has rows, each of these does."""
    starts = (a.ctypes.data if hasattr(a, "ctypes") else a.__cuda_array_interface__["data"][0] for a in arrays)
    return all(start % 16 == 0 for start in starts) and all(a.shape[-1] % 4 == 0 for a in arrays)


def multiply(
    out, a, b, *, a_m_major=False, b_m_major=False, epilogue=STORE, bias=None, extra=None,
    tf32=True, tile=None, splits=None, stream=0,
):  # fmt: skip
    """out (M,N) = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b is (N,K), or (K,N) if b_m_major. bias: (N,); extra:
    (M,N), what the epilogue reads or writes."""
    M, N = out.shape
    K = a.shape[0] if a_m_major else a.shape[1]
    chosen, parts = choose(M, N, K, tf32)
    tile, splits = tile or chosen, splits or parts
    bias, extra = out if bias is None else bias, out if extra is None else extra
    aligned = is_aligned(out, extra) and is_aligned(bias)
    target, how = (out, (epilogue, aligned)) if splits == 1 else (scratch("matmul parts", (splits * M, N)), (STORE, N % 4 == 0))
    run = kernel(tile, a_m_major, b_m_major, is_aligned(a), is_aligned(b), *how)
    share = ceil_div(ceil_div(K, splits), BK) * BK
    blocks = ceil_div(M, tile.BM) * ceil_div(N, tile.BN)
    launch = big_shared(run, (blocks, splits), tile.threads, stream, tile.shared(a_m_major, b_m_major))
    launch(target, a, b, bias, extra, int32(M), int32(N), int32(K), int32(share))
    if splits > 1:
        threads = M * N // 4 if aligned else M * N
        grid = ceil_div(threads, 256)
        add_splits(epilogue, aligned)[grid, 256, stream](out, target, bias, extra, int32(M), int32(N), int32(splits))
