"""Tiles of a head in shared memory, and products with them on the tensor cores: what the flash kernels are made of, in
TF32 or in three products of TF32.

A tile holds some rows (queries or keys) of one head, HS floats each: the head size rounded up to a multiple of 32, the
rest zeros. The flash kernels run blocks of 128 threads. In a warp, lane 4 g + t is called (g, t).

A warp's accumulator is a local array (m, n, 4): m tiles of 16 rows by n tiles of 8 columns, as mma_tf32 leaves them:
    acc[m, n, 0], acc[m, n, 1] = row 16 m + g,     columns 8 n + 2 t, 8 n + 2 t + 1
    acc[m, n, 2], acc[m, n, 3] = row 16 m + g + 8, the same columns
Products contract over an index that may be numbered in any order, so long as both operands agree. Both functions below
number it so that a lane reads 16 neighbouring bytes of a tile, and that an accumulator can be the next product's operand
where it is: no shuffles. See doc/attention.md for the drawing.
"""

import math

from kernels.device import FULL_MASK, cuda, float32, int32, load4, mma_tf32, need, store4
from kernels.intrinsics import MMA_TF32, TF32, cp_async16_zfill, ptx
from kernels.matmul.cores import round_tf32, seen

LOG2E = math.log2(math.e)
MASKED = float32(-1e30)  # a score that must not count: finite, so that nothing becomes inf - inf
HEAD_SIZES = (16, 32, 64, 80, 96, 128)
THREADS = 128  # four warps, one beside the other on the tile's rows


def any_head_size(C: int, NH: int) -> int:
    """The channels of a head, where any number will do."""
    need(C % NH == 0, f"needs channels that its heads can share evenly, got {C} channels in {NH} heads")
    return C // NH


def head_size(C: int, NH: int) -> int:
    """The channels of a head; ShapeError if there is no kernel for so many."""
    need(C % NH == 0 and C // NH in HEAD_SIZES, f"needs a head size among {HEAD_SIZES}, got {C} channels in {NH} heads")
    return C // NH


@cuda.jit(device=True, cache=True, forceinline=True)
def swizzle(row):
    """What is XORed to the number of a 16-byte piece of this row, so that the pieces that eight lanes read at once, in
    either product, lie in different banks: rows 0, 2, 4, 6 differ in bits 1 and 2, and a row from the next in bit 2."""
    return (row & 6) ^ ((row & 1) << 2)


@cuda.jit(device=True, cache=True, forceinline=True)
def stage(tile, base, HS, rows, source, first, stride, valid, hs):
    """Start to copy rows (source[first + row * stride :][:hs] each) to the tile; those from `valid` on are zeros."""
    lanes = 8 if HS == 32 else 16 if HS == 64 else 32  # threads for a row; of the 32, 24 are enough where HS is 96
    piece = cuda.threadIdx.x & (lanes - 1)
    row0 = (cuda.threadIdx.x & (THREADS - 1)) // lanes
    to, at = base + row0 * HS, first + row0 * stride + 4 * piece
    last = int32(valid - row0) if 4 * piece < hs else int32(0)
    for i in range(rows * lanes // THREADS):
        row = i * (THREADS // lanes)
        if HS != 96 or piece < 24:
            cp_async16_zfill(tile, to + row * HS + 4 * (piece ^ swizzle(row0 + row)), source, at + row * stride, row < last)


@cuda.jit(device=True, cache=True, forceinline=True)
def round_staged(tile, base, HS, rows):
    """Round to TF32, in place, what this thread has staged, once it has arrived."""
    lanes = 8 if HS == 32 else 16 if HS == 64 else 32
    piece = cuda.threadIdx.x & (lanes - 1)
    row0 = (cuda.threadIdx.x & (THREADS - 1)) // lanes
    for i in range(rows * lanes // THREADS):
        row = row0 + i * (THREADS // lanes)
        if HS != 96 or piece < 24:
            at = base + row * HS + 4 * (piece ^ swizzle(row))
            a, b, c, d = load4(tile, at)
            store4(tile, at, round_tf32(a), round_tf32(b), round_tf32(c), round_tf32(d))


@cuda.jit(device=True, cache=True, forceinline=True)
def clear(acc):
    for m in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for i in range(4):
                acc[m, n, i] = float32(0)


@cuda.jit(device=True, cache=True, forceinline=True)
def mma(acc, m, n, a0, a1, a2, a3, b0, b1):
    """acc[m, n] += a @ b."""
    acc[m, n, 0], acc[m, n, 1], acc[m, n, 2], acc[m, n, 3] = mma_tf32(
        acc[m, n, 0], acc[m, n, 1], acc[m, n, 2], acc[m, n, 3], a0, a1, a2, a3, b0, b1
    )


_ROUND = "add.s32 {0}, {1}, 0x1000; max.s32 {0}, {1}, {0};"
_REST = "and.b32 {0}, {1}, 0xffffe000; sub.f32 {0}, {2}, {0};"  # {2} less what a tensor core sees of {1}
_A = "$16, $17, $18, $19"


# The first product's result waits in c0 to c3: the outputs' registers may be those of inputs that the other two still read.
@ptx(
    "{.reg .b32 s0, s1, p0, p1, p2, p3, q0, q1; .reg .f32 c0, c1, c2, c3, d0, d1, d2, d3;"
    + "".join(_REST.format(f"p{i}", f"${16 + i}", f"${16 + i}") for i in range(4))
    + "".join(_ROUND.format(f"s{i}", f"${20 + i}") + _REST.format(f"q{i}", f"s{i}", f"${20 + i}") for i in range(2))
    + MMA_TF32.format("c0, c1, c2, c3", _A, "s0, s1", "$8, $9, $10, $11")
    + MMA_TF32.format("d0, d1, d2, d3", "p0, p1, p2, p3", "s0, s1", "$12, $13, $14, $15")
    + MMA_TF32.format("$4, $5, $6, $7", _A, "q0, q1", "d0, d1, d2, d3")
    + "".join(f"mov.f32 ${i}, c{i};" for i in range(4))
    + "}",
    returns=(float32,) * 8, takes=(float32,) * 8 + (TF32,) * 6, pure=True, collective=True,
)  # fmt: skip
def mma_3xtf32(c0, c1, c2, c3, d0, d1, d2, d3, a0, a1, a2, a3, b0, b1):
    """c + seen(a) @ seen(b), and d + rest(a) @ seen(b) + seen(a) @ rest(b): see three_products_core. b is rounded first, so that
    rest(b) has either sign: rest(a) @ rest(b), which is left out, cancels.

    In one piece: the compiler would compute the rest of what a loop does not change before the loop, which takes twice the
    registers, and it would not unroll loops with so many pieces in them. The assembler computes nothing twice, and deals the
    pieces out between products."""
    s0, s1 = round_tf32(b0), round_tf32(b1)
    p0, p1, p2, p3 = a0 - seen(a0), a1 - seen(a1), a2 - seen(a2), a3 - seen(a3)
    d0, d1, d2, d3 = mma_tf32(d0, d1, d2, d3, p0, p1, p2, p3, s0, s1)
    d0, d1, d2, d3 = mma_tf32(d0, d1, d2, d3, a0, a1, a2, a3, b0 - seen(s0), b1 - seen(s1))
    return *mma_tf32(c0, c1, c2, c3, a0, a1, a2, a3, s0, s1), d0, d1, d2, d3


@cuda.jit(device=True, cache=True, forceinline=True)
def multiply(acc, small, m, n, a0, a1, a2, a3, b0, b1, tf32):
    """acc[m, n] += a @ b in one product of TF32, of operands that are rounded. Or in three: acc + small is the sum then, as a
    tensor core cuts off each sum, and the larger the sum, the more that is."""
    if tf32 == 3:
        c0, c1, c2, c3, d0, d1, d2, d3 = mma_3xtf32(
            acc[m, n, 0], acc[m, n, 1], acc[m, n, 2], acc[m, n, 3],
            small[m, n, 0], small[m, n, 1], small[m, n, 2], small[m, n, 3], a0, a1, a2, a3, b0, b1,
        )  # fmt: skip
        acc[m, n, 0], acc[m, n, 1], acc[m, n, 2], acc[m, n, 3] = c0, c1, c2, c3
        small[m, n, 0], small[m, n, 1], small[m, n, 2], small[m, n, 3] = d0, d1, d2, d3
    else:
        mma(acc, m, n, a0, a1, a2, a3, b0, b1)


@cuda.jit(device=True, cache=True, forceinline=True)
def add(acc, small):
    for m in range(acc.shape[0]):
        for n in range(acc.shape[1]):
            for i in range(4):
                acc[m, n, i] += small[m, n, i]


@cuda.jit(device=True, cache=True, forceinline=True)
def operand(x, tf32):
    """x as `multiply` takes it: three products take it as it is."""
    return x if tf32 == 3 else round_tf32(x)


@cuda.jit(device=True, cache=True, forceinline=True)
def add_rows_product(acc, a, tile, base, HS, tf32):
    """acc += a @ tile.T, contracted over the head; a (m, HS / 8, 4) holds the warp's rows, as load_rows leaves them.

    Of each 16 channels lane (g, t) has channels 4 t to 4 t + 3: the first two are what a step calls t and t + 4, the last
    two what the next step does.
    """
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    start = base + g * HS
    small = cuda.local.array((2, 8, 4), float32)
    clear(small)
    for k in range(HS // 16):
        column = 32 * (k >> 1) + 4 * ((4 * (k & 1) + t) ^ swizzle(g))
        for n in range(acc.shape[1]):
            b0, b1, b2, b3 = load4(tile, start + 8 * n * HS + column)
            for m in range(acc.shape[0]):
                i, j = 2 * k, 2 * k + 1
                multiply(acc, small, m, n, a[m, i, 0], a[m, i, 1], a[m, i, 2], a[m, i, 3], b0, b1, tf32)
                multiply(acc, small, m, n, a[m, j, 0], a[m, j, 1], a[m, j, 2], a[m, j, 3], b2, b3, tf32)
    if tf32 == 3:
        add(acc, small)


@cuda.jit(device=True, cache=True, forceinline=True)
def keep_rows(smem, base, a):
    """Lay down a, the warp's rows as load_rows leaves them, for add_rows_product_kept: fewer registers, more loads. A warp's
    lanes find there what they wrote themselves, so nobody waits."""
    for m in range(a.shape[0]):
        for k in range(a.shape[1]):
            store4(smem, kept(base, m * a.shape[1] + k), a[m, k, 0], a[m, k, 1], a[m, k, 2], a[m, k, 3])


@cuda.jit(device=True, cache=True, forceinline=True)
def kept(base, i):
    """Where this thread's i-th four numbers lie."""
    return base + 4 * (i * THREADS + cuda.threadIdx.x)


@cuda.jit(device=True, cache=True, forceinline=True)
def add_rows_product_kept(acc, smem, a_base, tile, base, HS, tf32):
    """add_rows_product with rows that keep_rows has laid down."""
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    start = base + g * HS
    small = cuda.local.array((2, 8, 4), float32)
    clear(small)
    a = cuda.local.array((2, 16, 4), float32)  # indexed by k, so that the compiler unrolls the loop over k
    for k in range(HS // 16):
        column = 32 * (k >> 1) + 4 * ((4 * (k & 1) + t) ^ swizzle(g))
        for m in range(acc.shape[0]):
            for i in range(2 * k, 2 * k + 2):
                a[m, i, 0], a[m, i, 1], a[m, i, 2], a[m, i, 3] = load4(smem, kept(a_base, m * (HS // 8) + i))
        for n in range(acc.shape[1]):
            b0, b1, b2, b3 = load4(tile, start + 8 * n * HS + column)
            for m in range(acc.shape[0]):
                i, j = 2 * k, 2 * k + 1
                multiply(acc, small, m, n, a[m, i, 0], a[m, i, 1], a[m, i, 2], a[m, i, 3], b0, b1, tf32)
                multiply(acc, small, m, n, a[m, j, 0], a[m, j, 1], a[m, j, 2], a[m, j, 3], b2, b3, tf32)
    if tf32 == 3:
        add(acc, small)


@cuda.jit(device=True, cache=True, forceinline=True)
def add_columns_product(acc, p, tile, base, HS, tf32):
    """acc += p @ tile, contracted over the tile's rows; p (m, k, 4) is an accumulator of its 8 k rows.

    Of each 8 rows lane (g, t) has rows 2 t and 2 t + 1 of p's columns: what the step calls t and t + 4. It reads 4
    channels of both, 4 g to 4 g + 3 of each 32, one for each of 4 column tiles. So acc[m, 4 h + i, c] is channel
    32 h + 4 (2 t + (c & 1)) + i: store_rows knows.

    Three products of TF32 are added up over the tile alone inside the tensor core, which cuts off as it adds; acc gets the sum.
    """
    if tf32 == 3:
        part, small = cuda.local.array((2, 4, 4), float32), cuda.local.array((2, 4, 4), float32)
        for h in range(HS // 32):
            clear(part)
            clear(small)
            for k in range(p.shape[1]):
                add_columns(part, small, 0, p, k, tile, base, HS, h, tf32)
            for m in range(acc.shape[0]):
                for n in range(4):
                    for i in range(4):
                        acc[m, 4 * h + n, i] += part[m, n, i] + small[m, n, i]
    else:
        for k in range(p.shape[1]):
            for h in range(HS // 32):
                add_columns(acc, acc, 4 * h, p, k, tile, base, HS, h, tf32)


@cuda.jit(device=True, cache=True, forceinline=True)
def add_columns(acc, small, n, p, k, tile, base, HS, h, tf32):
    """Of add_columns_product the tile's rows 8 k to 8 k + 7 and channels 32 h to 32 h + 31, in column tiles n to n + 3 of acc."""
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    even = base + 2 * t * HS + 4 * (g ^ swizzle(2 * t))
    odd = base + (2 * t + 1) * HS + 4 * (g ^ swizzle(2 * t + 1))
    x0, x1, x2, x3 = load4(tile, even + 8 * k * HS + 32 * h)
    y0, y1, y2, y3 = load4(tile, odd + 8 * k * HS + 32 * h)
    for m in range(p.shape[0]):
        a0, a1, a2, a3 = p[m, k, 0], p[m, k, 2], p[m, k, 1], p[m, k, 3]
        multiply(acc, small, m, n, a0, a1, a2, a3, x0, y0, tf32)
        multiply(acc, small, m, n + 1, a0, a1, a2, a3, x1, y1, tf32)
        multiply(acc, small, m, n + 2, a0, a1, a2, a3, x2, y2, tf32)
        multiply(acc, small, m, n + 3, a0, a1, a2, a3, x3, y3, tf32)


@cuda.jit(device=True, cache=True, forceinline=True)
def load_rows(a, source, first, stride, row0, T, hs, factor, tf32):
    """a (m, HS / 8, 4): the warp's rows from row0 on, times the factor, for add_rows_product; zeros from T on."""
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    for m in range(a.shape[0]):
        for r in range(2):
            row = row0 + 16 * m + 8 * r + g
            for k in range(a.shape[1] // 2):
                x0, x1, x2, x3 = float32(0), float32(0), float32(0), float32(0)
                if row < T and 16 * k < hs:
                    x0, x1, x2, x3 = load4(source, first + row * stride + 16 * k + 4 * t)
                a[m, 2 * k, r] = operand(x0 * factor, tf32)
                a[m, 2 * k, 2 + r] = operand(x1 * factor, tf32)
                a[m, 2 * k + 1, r] = operand(x2 * factor, tf32)
                a[m, 2 * k + 1, 2 + r] = operand(x3 * factor, tf32)


@cuda.jit(device=True, cache=True, forceinline=True)
def mask_above(s, diagonal):
    """Scores s (m, n, 4) whose column is more than `diagonal` right of their row, both counted from the warp's corner."""
    lane = cuda.threadIdx.x & 31
    limit = int32(diagonal + (lane >> 2) - 2 * (lane & 3))
    for m in range(s.shape[0]):
        for n in range(s.shape[1]):
            for i in range(4):
                if 8 * n + (i & 1) - 16 * m - 8 * (i >> 1) > limit:
                    s[m, n, i] = MASKED


@cuda.jit(device=True, cache=True, forceinline=True)
def mask_below(s, diagonal):
    """Scores s (m, n, 4) whose column is less than `diagonal` right of their row: mask_above of the transpose."""
    lane = cuda.threadIdx.x & 31
    limit = int32(diagonal + (lane >> 2) - 2 * (lane & 3))
    for m in range(s.shape[0]):
        for n in range(s.shape[1]):
            for i in range(4):
                if 8 * n + (i & 1) - 16 * m - 8 * (i >> 1) < limit:
                    s[m, n, i] = MASKED


@cuda.jit(device=True, cache=True, forceinline=True)
def store_rows(out, first, stride, row0, T, hs, acc, factors):
    """out[first + row * stride :][:hs] = factors[m, r] * acc for the warp's rows from row0 on, but those from T on."""
    lane = cuda.threadIdx.x & 31
    g, t = lane >> 2, lane & 3
    for m in range(acc.shape[0]):
        for r in range(2):
            row = row0 + 16 * m + 8 * r + g
            f = factors[m, r]
            if row < T:
                for h in range(acc.shape[1] // 4):
                    for c in range(2):
                        channel = 32 * h + 8 * t + 4 * c
                        i = 2 * r + c
                        x0, x1, x2, x3 = acc[m, 4 * h, i], acc[m, 4 * h + 1, i], acc[m, 4 * h + 2, i], acc[m, 4 * h + 3, i]
                        if channel < hs:
                            store4(out, first + row * stride + channel, x0 * f, x1 * f, x2 * f, x3 * f)


@cuda.jit(device=True, cache=True, forceinline=True)
def quad_max(x):
    """The maximum over the four lanes that share g: the lanes of a row."""
    x = max(x, cuda.shfl_xor_sync(FULL_MASK, x, 1))
    return max(x, cuda.shfl_xor_sync(FULL_MASK, x, 2))


@cuda.jit(device=True, cache=True, forceinline=True)
def quad_sum(x):
    """The sum over the four lanes that share g."""
    x += cuda.shfl_xor_sync(FULL_MASK, x, 1)
    return x + cuda.shfl_xor_sync(FULL_MASK, x, 2)
