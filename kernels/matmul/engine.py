"""The engine of versions 8, 10 and 11: one kernel for all three products, with fp32 arithmetic or on the tensor cores in TF32.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K) or, if b_m_major, (K,N)

Each block makes a BM x BN tile of out, each of its warps a WM x WN tile of that, walking along K in steps of BK. While the
warps multiply one step, cp.async brings the next ones into shared memory. K-major tiles stand there as they came, a row 128
bytes, their 16-byte chunks swizzled; M-major ones with rows padded by 32 bytes: no read meets another in a bank.

A lane's elements of a fragment lie K apart or M apart in the definition of mma.m16n8k8. But a sum may be taken in any
order, and rows of a tile may be dealt to lanes in any order, as long as a and b agree on the first and the store knows of
the second. So lane 4 g + t takes, of 16 steps along K, the neighbouring 4 t to 4 t + 3, and of 32 rows the neighbouring
4 g to 4 g + 3: whatever the layout, it reads 16 bytes at a time, and it stores 32 bytes of a row of out.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from kernels.device import (
    big_shared, ceil_div, cp_async4_zfill, cp_async16_zfill, cp_async_commit, cp_async_wait, cuda, float32, int32, int64, load4,
    mma_tf32, multiprocessors, scratch, store4,
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
    WN: int = 64  # a multiple of 32
    stages: int = 3
    blocks: int = 2  # a multiprocessor holds
    tf32: bool = True

    @property
    def threads(self) -> int:
        return 32 * (self.BM // self.WM) * (self.BN // self.WN)

    def shared(self, a_m_major: bool, b_m_major: bool) -> int:
        return 4 * self.stages * (operand_size(a_m_major, self.BM) + operand_size(b_m_major, self.BN))


BK = 32  # floats: a row of a K-major tile is 128 bytes, all banks once
ROOT = math.sqrt(2 / math.pi)  # of GELU
PAD = 8  # floats between the rows of an M-major tile: lanes t = 0..3 read rows 0..3, and must not meet in a bank


def operand_size(m_major: bool, rows: int) -> int:
    """Floats of one stage of an operand's tile."""
    return BK * (rows + PAD) if m_major else rows * BK


@cuda.jit(device=True, cache=True)
def swizzle(g, chunk):
    """Where a row of a K-major tile keeps its chunk of 16 bytes, of eight; g: the row's number // 4, of which bits 0 to 2
    count. Rows of g and g + 1, g even, keep a chunk in opposite halves: what eight lanes read at once fills 32 banks."""
    return chunk ^ ((g & 1) << 2 | (g >> 1) & 3)


@functools.cache
def copy_tile(m_major: bool, rows: int, threads: int, aligned: bool):
    """A device function that starts to copy a tile of an operand, `rows` rows from `first` on and BK steps from k on, to
    shared[at:]. What lies outside of the operand becomes zero."""
    passes = rows * BK // 4 // threads
    steps = threads * 4 // rows  # of an M-major tile a pass

    @cuda.jit(device=True)
    def copy_k_major(shared, at, source, first, k, count, K, end):
        """source: (count, K). A thread's rows share their g, so that its places in shared memory differ by constants."""
        thread = int32(cuda.threadIdx.x)
        g, chunk = thread >> 3, thread & 7
        row = (g & 7) * 4 + (g >> 3) * 32
        to = at + row * BK + 4 * swizzle(g, chunk)
        start = int64(first + row) * K + (k + 4 * chunk)
        for i in range(passes):
            more = i % 4 + i // 4 * (threads // 2)
            for j in range(1 if aligned else 4):
                valid = first + row + more < count and k + 4 * chunk + j < end
                if aligned:
                    cp_async16_zfill(shared, to + more * BK, source, start + more * K, valid)
                else:
                    cp_async4_zfill(shared, to + more * BK + j, source, start + more * K + j, valid)

    @cuda.jit(device=True)
    def copy_m_major(shared, at, source, first, k, count, K, end):
        """source: (K, count). Step 4 t + j of each 16 is kept in row t + 4 j."""
        thread = int32(cuda.threadIdx.x)
        step, column = thread // (rows // 4), thread % (rows // 4) * 4
        to = at + in_tile(step) * (rows + PAD) + column
        start = int64(k + step) * count + (first + column)
        for i in range(passes):
            more = i * steps
            for j in range(1 if aligned else 4):
                valid = k + step + more < end and first + column + j < count
                if aligned:
                    cp_async16_zfill(shared, to + in_tile(more) * (rows + PAD), source, start + more * count, valid)
                else:
                    cp_async4_zfill(shared, to + in_tile(more) * (rows + PAD) + j, source, start + more * count + j, valid)

    return copy_m_major if m_major else copy_k_major


@cuda.jit(device=True, cache=True)
def in_tile(step):
    """The row of an M-major tile for a step of K: 4 t + j of each 16 goes to t + 4 j."""
    return step & 16 | (step & 3) << 2 | (step >> 2) & 3


@cuda.jit(device=True, cache=True)
def gelu_gate(x):
    """0.5 * (1 + tanh(u)) is the logistic function of 2 u, with u = sqrt(2/pi) * (x + 0.044715 x^3)."""
    return float32(1) / (float32(1) + math.exp(float32(-2 * ROOT) * (x + float32(0.044715) * x * x * x)))


@functools.cache
def finish(epilogue: int):
    """A device function: what out becomes where a @ b is x; extra is the residual, GELU's input, or what out was."""

    @cuda.jit(device=True)
    def finished(x, bias, extra):
        if epilogue == BIAS:
            return x + bias
        if epilogue == BIAS_RESIDUAL:
            return extra + (x + bias)
        if epilogue == ADD:
            return extra + x
        if epilogue == SLOPE:
            gate = gelu_gate(extra)
            slope = float32(2 * ROOT) * (float32(1) + float32(3 * 0.044715) * extra * extra)
            return x * (gate + extra * gate * (float32(1) - gate) * slope)
        return x

    return finished


@functools.cache
def store_one(epilogue: int):
    """A device function that finishes and stores one element of out, an array of N columns."""
    has_bias, has_extra = epilogue in (BIAS, BIAS_GELU, BIAS_RESIDUAL), epilogue in (BIAS_RESIDUAL, SLOPE, ADD)
    finished = finish(epilogue)

    @cuda.jit(device=True)
    def store(out, bias, extra, row, column, N, x):
        if column < N:
            b = bias[column] if has_bias else x
            if epilogue == BIAS_GELU:
                extra[row, column] = x + b
                out[row, column] = (x + b) * gelu_gate(x + b)
            else:
                out[row, column] = finished(x, b, extra[row, column] if has_extra else x)

    return store


@functools.cache
def store_tile(epilogue: int, aligned: bool):
    """A device function that finishes and stores four neighbours of a row, those that are columns of out."""
    has_bias, has_extra = epilogue in (BIAS, BIAS_GELU, BIAS_RESIDUAL), epilogue in (BIAS_RESIDUAL, SLOPE, ADD)
    finished, store = finish(epilogue), store_one(epilogue)

    @cuda.jit(device=True)
    def store_aligned(out, bias, extra, row, column, N, x0, x1, x2, x3):
        at = int64(row) * N + column
        b0, b1, b2, b3 = load4(bias, column) if has_bias else (x0, x1, x2, x3)
        e0, e1, e2, e3 = load4(extra, at) if has_extra else (x0, x1, x2, x3)
        if epilogue == BIAS_GELU:
            x0, x1, x2, x3 = x0 + b0, x1 + b1, x2 + b2, x3 + b3
            store4(extra, at, x0, x1, x2, x3)
            store4(out, at, x0 * gelu_gate(x0), x1 * gelu_gate(x1), x2 * gelu_gate(x2), x3 * gelu_gate(x3))
        else:
            store4(
                out, at, finished(x0, b0, e0), finished(x1, b1, e1), finished(x2, b2, e2), finished(x3, b3, e3)
            )  # fmt: skip

    @cuda.jit(device=True)
    def store_any(out, bias, extra, row, column, N, x0, x1, x2, x3):
        store(out, bias, extra, row, column, N, x0)
        store(out, bias, extra, row, column + 1, N, x1)
        store(out, bias, extra, row, column + 2, N, x2)
        store(out, bias, extra, row, column + 3, N, x3)

    return store_aligned if aligned else store_any


@functools.cache
def tensor_core(tile: "Tile", a_m_major: bool, b_m_major: bool, store):
    """The two device functions of a warp on the tensor cores: multiply a step of BK, and store the sums."""
    WM, WN = tile.WM, tile.WN
    read_a, read_b = read_fragment(a_m_major, tile.BM, WM), read_fragment(b_m_major, tile.BN, WN)
    SLOTS_A, SLOTS_B = (WM // 8, 4), (WN // 8, 4)

    @cuda.jit(device=True)
    def multiply_step(sums, shared, at_a, at_b, row, column, lane):
        fragment_a = cuda.local.array(SLOTS_A, float32)
        fragment_b = cuda.local.array(SLOTS_B, float32)
        g, t = lane >> 2, lane & 3
        for half in range(BK // 16):
            read_a(fragment_a, shared, at_a, row, half, g, t)
            read_b(fragment_b, shared, at_b, column, half, g, t)
            for s in range(0, 4, 2):
                for i in range(WM // 16):
                    for j in range(WN // 8):
                        c = (i * (WN // 8) + j) * 4
                        sums[c], sums[c + 1], sums[c + 2], sums[c + 3] = mma_tf32(
                            sums[c], sums[c + 1], sums[c + 2], sums[c + 3],
                            fragment_a[2 * i, s], fragment_a[2 * i + 1, s],
                            fragment_a[2 * i, s + 1], fragment_a[2 * i + 1, s + 1],
                            fragment_b[j, s], fragment_b[j, s + 1],
                        )  # fmt: skip

    @cuda.jit(device=True)
    def store_sums(sums, out, bias, extra, row, column, last_row, N, lane):
        g, t = lane >> 2, lane & 3
        for i in range(WM // 8):
            for j in range(WN // 16):  # four columns 8 t + 4 (j % 2) of 32
                r, n = row + 32 * (i // 4) + 4 * g + i % 4, column + 32 * (j // 2) + 8 * t + 4 * (j % 2)
                if r < last_row and n < N:
                    c = (i // 2 * (WN // 8) + 4 * (j // 2)) * 4 + 2 * (i % 2) + j % 2
                    store(out, bias, extra, r, n, N, sums[c], sums[c + 4], sums[c + 8], sums[c + 12])

    return multiply_step, store_sums


@functools.cache
def fp32_core(tile: "Tile", a_m_major: bool, b_m_major: bool, store):
    """The two device functions of a warp with fp32 arithmetic: lanes 8 x 4, each with its own rows and columns in fours."""
    TM, TN = tile.WM // 8, tile.WN // 4
    A_ROW, B_ROW = tile.BM + PAD, tile.BN + PAD
    SHAPE_A, SHAPE_B = (TM, 4), (TN, 4)

    @cuda.jit(device=True)
    def multiply_step(sums, shared, at_a, at_b, row, column, lane):
        a = cuda.local.array(SHAPE_A, float32)
        b = cuda.local.array(SHAPE_B, float32)
        y, x = lane >> 2, lane & 3
        for chunk in range(BK // 4):
            if a_m_major:
                for k in range(4):
                    for i in range(0, TM, 4):
                        at = at_a + in_tile(4 * chunk + k) * A_ROW + row + 8 * i + 4 * y
                        a[i, k], a[i + 1, k], a[i + 2, k], a[i + 3, k] = load4(shared, at)
            else:
                for i in range(TM):
                    at = at_a + (row + 4 * y + i // 4 * 32 + i % 4) * BK + 4 * swizzle(y, chunk)
                    a[i, 0], a[i, 1], a[i, 2], a[i, 3] = load4(shared, at)
            if b_m_major:
                for k in range(4):
                    for j in range(0, TN, 4):
                        at = at_b + in_tile(4 * chunk + k) * B_ROW + column + 4 * j + 4 * x
                        b[j, k], b[j + 1, k], b[j + 2, k], b[j + 3, k] = load4(shared, at)
            else:
                for j in range(TN):
                    r = column + 4 * x + j // 4 * 16 + j % 4
                    b[j, 0], b[j, 1], b[j, 2], b[j, 3] = load4(shared, at_b + r * BK + 4 * swizzle(r >> 2, chunk))
            for k in range(4):
                for i in range(TM):
                    for j in range(TN):
                        sums[i * TN + j] += a[i, k] * b[j, k]

    @cuda.jit(device=True)
    def store_sums(sums, out, bias, extra, row, column, last_row, N, lane):
        y, x = lane >> 2, lane & 3
        for i in range(TM):
            for j in range(0, TN, 4):
                r, n = row + 4 * y + i // 4 * 32 + i % 4, column + 4 * x + 4 * j
                if r < last_row and n < N:
                    c = i * TN + j
                    store(out, bias, extra, r, n, N, sums[c], sums[c + 1], sums[c + 2], sums[c + 3])

    return multiply_step, store_sums


GROUP = 8  # rows of blocks that walk along N together, so that L2 serves them


@functools.cache
def kernel(tile: Tile, a_m_major: bool, b_m_major: bool, a_aligned: bool, b_aligned: bool, epilogue: int, out_aligned: bool):
    BM, BN, WM, WN, STAGES = tile.BM, tile.BN, tile.WM, tile.WN, tile.stages
    A_SIZE, STAGE = operand_size(a_m_major, BM), operand_size(a_m_major, BM) + operand_size(b_m_major, BN)
    SUMS, AHEAD = WM * WN // 32, STAGES - 2
    copy_a = copy_tile(a_m_major, BM, tile.threads, a_aligned)
    copy_b = copy_tile(b_m_major, BN, tile.threads, b_aligned)
    core = tensor_core if tile.tf32 else fp32_core
    multiply_step, store_sums = core(tile, a_m_major, b_m_major, store_tile(epilogue, out_aligned))

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
        row = split * M + first_row + warp_row
        store_sums(sums, out, bias, extra, row, first_column + warp_column, (split + 1) * M, N, lane)

    return matmul_kernel


@functools.cache
def add_splits(epilogue: int, aligned: bool):
    store = store_tile(epilogue, aligned)

    @cuda.jit(fastmath=True)
    def add_splits_kernel(out, parts, bias, extra, M, N, splits):
        """out (M,N) = the sum of parts (splits * M, N), finished. A thread four columns, or one where not aligned."""
        width = 4 if aligned else 1
        index = cuda.grid(1)
        row, column = index // (N // width), index % (N // width) * width
        if row < M:
            x0, x1, x2, x3 = float32(0), float32(0), float32(0), float32(0)
            for split in range(splits):
                at = (int64(split) * M + row) * N + column
                if aligned:
                    y0, y1, y2, y3 = load4(parts, at)
                    x0, x1, x2, x3 = x0 + y0, x1 + y1, x2 + y2, x3 + y3
                else:
                    x0 += parts[split * M + row, column]
            if aligned:
                store(out, bias, extra, row, column, N, x0, x1, x2, x3)
            else:
                store(out, bias, extra, row, column, column + 1, x0, x1, x2, x3)

    return add_splits_kernel


def choose(M: int, N: int, K: int) -> tuple[Tile, int]:
    """The tile, and into how many parts to split K so that there is work for every multiprocessor."""
    if M * N <= 256 * 256:
        tile = Tile(64, 64, 32, 32, 3, 4)
    else:
        tile = Tile()
    blocks, places = ceil_div(M, tile.BM) * ceil_div(N, tile.BN), tile.blocks * multiprocessors()
    return tile, max(1, min(places // blocks, K // (8 * BK)))


def is_aligned(*arrays) -> bool:
    """Whether each starts at a multiple of 16 bytes and, if it has rows, each of these does."""
    starts = (a.ctypes.data if hasattr(a, "ctypes") else a.__cuda_array_interface__["data"][0] for a in arrays)
    return all(start % 16 == 0 for start in starts) and all(a.shape[-1] % 4 == 0 for a in arrays)


def multiply(out, a, b, *, a_m_major=False, b_m_major=False, epilogue=STORE, bias=None, extra=None, tile=None, splits=None, stream=0):
    """out (M,N) = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b is (N,K), or (K,N) if b_m_major. bias: (N,); extra:
    (M,N), what the epilogue reads or writes."""
    M, N = out.shape
    K = a.shape[0] if a_m_major else a.shape[1]
    chosen, parts = choose(M, N, K)
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
        add_splits(epilogue, aligned)[ceil_div(threads, 256), 256, stream](out, target, bias, extra, int32(M), int32(N), int32(splits))
