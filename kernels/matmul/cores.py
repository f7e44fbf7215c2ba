"""What the warps of a block do with its tiles: three cores, each a few device functions of one warp.

    fp32_core      fp32 arithmetic; a lane has its own rows and columns
    tensor_core    mma.sync in TF32: both operands are rounded to 11 bits
    three_products_core     mma.sync in TF32 three times over: nearly all 24 bits of both operands count

In the definition of mma.m16n8k8 a lane's elements of a fragment lie 8 rows apart. But rows of a tile may be dealt to lanes in any
order, as long as the store knows of it. So lane 4 g + t takes the neighbours 2 g and 2 g + 1 of 16: of an M-major tile it reads
both at once, and of a row of out it has four neighbours, which it stores at once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kernels.device import cuda, float32, int32, ldmatrix_x4, load2, load4, mma_tf32
from kernels.intrinsics import ptx
from kernels.matmul.epilogue import epilogue_of
from kernels.matmul.tiles import BK, PAD, PAD_FP32, Tile, swizzle


class Core(NamedTuple):
    """What a lane holds, and device functions of a warp. The sums are zero at first."""

    a: int  # floats of a fragment of a
    b: int
    sums: int
    parts: int  # of the sums, for store_part
    read: Callable  # a fragment of both operands from shared memory
    prepare: Callable  # what was read of b before anything else
    multiply_first: Callable  # a fragment, the first of UNROLL in a row; and prepare the next b
    multiply: Callable  # any other
    gather: Callable  # the sums are complete, once this has been called
    store_part: Callable  # a part of them


@cuda.jit(device=True, cache=True)
def nothing(array):
    """Where a core has nothing to prepare or to gather."""


@ptx(
    "{.reg .b32 x, y; mov.b32 x, $1; add.s32 y, x, 0x1000; max.s32 y, x, y; mov.b32 $0, y;}",
    returns=float32, takes=(float32,), pure=True,
)  # fmt: skip
def round_tf32(x):
    """x for a tensor core, which ignores the low 13 bits: half a unit of the last place that it sees is added, so that cutting
    off rounds to nearest. The max is for the NaN of a GPU, 0x7fffffff, which would wrap round to zero. (One with its sign set, from
    0xfffff000 on, does so still; the simulator keeps it, for such is its poison.) What cvt.rna.tf32 takes three instructions for,
    in one (VIADDMNMX on Hopper) or two."""
    bits = int(np.float32(x).view(np.uint32))
    return np.uint32(bits if bits & 0x7FFFFFFF > 0x7F800000 else bits + 0x1000).view(np.float32)


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
def products_of_row(WN: int):
    """A device function: the products of 16 rows, a lane's a0 to a3, and WN columns."""

    @cuda.jit(device=True)
    def multiply_row(sums, first, a0, a1, a2, a3, b):
        for j in range(WN // 8):
            c, k = first + 4 * j, j // 2 * 4 + j % 2
            sums[c], sums[c + 1], sums[c + 2], sums[c + 3] = mma_tf32(
                sums[c], sums[c + 1], sums[c + 2], sums[c + 3], a0, a1, a2, a3, b[k], b[k + 2]
            )

    return multiply_row


@functools.cache
def tensor_core(tile: Tile, a_m_major: bool, b_m_major: bool, epilogue: int, aligned: bool):
    """In TF32. A fragment is 8 steps of both operands, which are rounded on the way."""
    WM, WN = tile.WM, tile.WN
    multiply_row = products_of_row(WN)
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
            multiply_row(sums, i * (WN // 8), a0, a1, a2, a3, b)
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

    return Core(A, B, WM * WN // 32, WN // 8, read, round_b, multiply, multiply, nothing, store_part)


@ptx("and.b32 $0, $1, 0xffffe000;", returns=float32, takes=(float32,), pure=True)
def seen(x):
    """What a tensor core sees of x: all but the low 13 bits."""
    return (np.float32(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@functools.cache
def three_products_core(tile: Tile, a_m_major: bool, b_m_major: bool, epilogue: int, aligned: bool):
    """The digits of fp32 out of TF32: x is the 11 bits that a tensor core sees of it, and the rest, of which it sees 11 more. So

        x y = seen(x) seen(y) + seen(x) rest(y) + rest(x) seen(y) + what is less than 2^-19 of it, and left out

    Three products, the small ones first. And a tensor core cuts off where fp32 arithmetic rounds when it adds: over K of thousands
    that alone would cost two digits. So it never adds up more than a step of BK; these sums are added in fp32 arithmetic. An
    infinite operand makes NaN: what is left of it, infinity less infinity, is none. (Ootomo and Yokota 2022, arXiv:2203.03341)"""
    core = tensor_core(tile, a_m_major, b_m_major, epilogue, aligned)
    A, B, SUMS = core.a, core.b, core.sums
    ROW = tile.WN // 2  # sums of 16 rows
    multiply_row = products_of_row(tile.WN)

    @cuda.jit(device=True)
    def gather_some(sums, first, end):
        """The second half of the array is a step's sums, the first half those of all steps before it."""
        for i in range(first, end):
            sums[i] += sums[SUMS + i]
            sums[SUMS + i] = float32(0)

    @cuda.jit(device=True)
    def gather(sums):
        gather_some(sums, 0, SUMS)

    def make_multiply(first: bool):
        @cuda.jit(device=True)
        def multiply(sums, a, b, next_b):
            """b is rounded and not cut off, so that its rest has either sign; and so it is moved to where two registers lie side by
            side, as mma takes them. a lies right as read."""
            rounded_b = cuda.local.array(B, float32)
            rest_b = cuda.local.array(B, float32)
            for k in range(B):
                rounded_b[k] = round_tf32(b[k])
                rest_b[k] = b[k] - seen(rounded_b[k])
            for i in range(0, A, 4):
                at = i // 4 * ROW
                if first:
                    gather_some(sums, at, at + ROW)
                a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
                multiply_row(sums, SUMS + at, a0 - seen(a0), a1 - seen(a1), a2 - seen(a2), a3 - seen(a3), rounded_b)
                multiply_row(sums, SUMS + at, a0, a1, a2, a3, rest_b)
                multiply_row(sums, SUMS + at, a0, a1, a2, a3, rounded_b)

        return multiply

    multiply_first, multiply = make_multiply(True), make_multiply(False)
    return core._replace(sums=2 * SUMS, prepare=nothing, multiply_first=multiply_first, multiply=multiply, gather=gather)


@functools.cache
def fp32_core(tile: Tile, epilogue: int, aligned: bool):
    """In fp32 arithmetic. Lanes 4 x 8, each with its own rows and columns in fours; a fragment is one step of both operands."""
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

    return Core(A, B, A * B, A * B // 16, read, nothing, multiply, multiply, nothing, store_part)
