"""Tiles and products for Hopper's wgmma: what version 8 of the flash kernels is made of. Heads of 64 channels.

A block has two warp groups of 128 threads, each with 64 rows of its own (queries or keys), and both walk over the same tiles
of 64 rows of the other kind. In a warp, lane 4 g + t is called (g, t).

wgmma reads its second operand from shared memory, the contracted index along the row. So a tile lies there as it is, for
what contracts over channels (rows_product), or transposed, for what contracts over its rows (add_columns_product), or both.
Either way it is 64 rows of 64 floats, in two halves: the first 32 floats of each row, then the last 32, and in a half's row r
the 16-byte piece number n stands at n ^ (r % 8). Of a transposed row's 8 numbers the even ones come first,
    0 2 4 6 1 3 5 7
because that is how the lanes hold an accumulator's columns: so it is the next product's first operand where it is.

Registers, for both a warp group's 64 x 64 accumulators and first operands, are local arrays of 32:
    acc[4 j + c] = acc[16 warp + g + 8 (c // 2), 8 j + 2 t + c % 2]
    a[4 k + c]   = a[16 warp + g + 8 (c % 2), 8 k + t + 4 (c // 2)]
"""

import numpy as np

from kernels.attention.tiles import MASKED
from kernels.device import FULL_MASK, cp_async16, cuda, float32, int32, int64, load4, need, store2, store4, uint64
from kernels.intrinsics import TF32, ptx
from kernels.matmul.wgmma import make_wgmma, wgmma_commit, wgmma_fence, wgmma_wait

THREADS = 256
GROUP_ROWS = 64  # of a warp group
ROWS = 128  # of a block
STEP = 64  # rows of a tile
HALF = 64 * 32
TILE = 2 * HALF  # floats

# A number cut off to TF32 instead of rounded loses 2^-11 of its power of two on average, and so a sum of products with such
# numbers shrinks by about 2/3 of 2^-11: the other factor makes up for it. What remains is no more than rounding's error.
MADE_UP = float32(1 + 2 / 3 / 2**11)

wgmma, wgmma_shared, wgmma_finish = make_wgmma(64)


def check_head_size(hs: int) -> None:
    need(hs == 64, f"needs heads of 64 channels, got {hs}")


@ptx("add.u32 $0, $1, 0x1000;", returns=TF32, takes=(TF32,), pure=True)
def round_finite(x):
    """A finite x rounded to TF32, ties away from zero, if the reader ignores the low 13 bits as wgmma does: half a unit is added,
    nothing cut off. (A NaN would become zero: one in a value passes the forward pass unseen, and shows in the gradients.)"""
    return (np.float32(x).view(np.uint32) + np.uint32(0x1000)).view(np.float32)


# Products -------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def rows_product(s, a, smem, tile):
    """Start s = a @ tile.T, contracted over channels."""
    wgmma_fence()
    for k in range(8):
        wgmma(s, smem, tile + (k >> 2) * HALF + 8 * (k & 3), k > 0, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3])
    wgmma_commit()


@cuda.jit(device=True, cache=True, forceinline=True)
def tiles_product(s, smem, rows, tile):
    """Start s = rows @ tile.T, contracted over channels: both are tiles."""
    wgmma_fence()
    for k in range(8):
        at = (k >> 2) * HALF + 8 * (k & 3)
        wgmma_shared(s, smem, rows + at, tile + at, k > 0)
    wgmma_commit()


@cuda.jit(device=True, cache=True, forceinline=True)
def add_columns_product(acc, p, smem, tile):
    """Start acc += p @ tile, contracted over the rows of a tile that lies transposed; p is an accumulator."""
    wgmma_fence()
    for k in range(8):
        wgmma(acc, smem, tile + (k >> 2) * HALF + 8 * (k & 3), 1, p[4 * k], p[4 * k + 2], p[4 * k + 1], p[4 * k + 3])
    wgmma_commit()


@ptx("mov.f32 $0, $1;", returns=float32, takes=(float32,))
def settled(x):
    """x, from here on: the compiler must not read it before what stands above, a wait."""
    return x


@cuda.jit(device=True, cache=True, forceinline=True)
def wait_for(acc):
    """Wait for acc, all of whose products but those of the last one that was started have to be done."""
    wgmma_wait(1)
    for i in range(32):
        acc[i] = settled(acc[i])


@cuda.jit(device=True, cache=True, forceinline=True)
def clear(acc):
    for i in range(32):
        acc[i] = float32(0)


# Tiles ----------------------------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def my_block():
    """(row, piece): this thread carries the channels of one piece, 4 piece to 4 piece + 3, of the rows row, row + 2, row + 4 and
    row + 6 of a tile. Blocks are dealt so that eight lanes meet in no bank, the tile lying either way."""
    thread = int32(cuda.threadIdx.x)
    row = 8 * (thread >> 1 & 1 | thread >> 4 & 6) + (thread & 1)
    piece = (thread >> 2 & 7) ^ (thread & 2) ^ (thread & 1) << 2 | thread >> 4 & 8
    return int32(row), int32(piece)


@cuda.jit(device=True, cache=True, forceinline=True)
def copy_block(smem, tile, source, first, stride, row0, T):
    """Start to copy this thread's block of the tile of source's rows from row0 on, source[first + row * stride :][:64]. For rows
    from T on the last one stands in: what they bring is masked or not stored."""
    (row, piece), last = my_block(), int32(T - 1)
    to = int32(tile + (piece >> 3) * HALF + row * 32 + 4 * ((piece ^ row) & 7))
    for i in range(4):
        at = int32(min(int32(row0 + row + 2 * i), last) * stride + 4 * piece)
        cp_async16(smem, (to ^ 8 * i) + 64 * i, source, first + at)


@cuda.jit(device=True, cache=True, forceinline=True)
def turn_block(smem, tile, turned):
    """Store this thread's block of a tile, which has arrived, in a transposed tile, rounded."""
    row, piece = my_block()
    at = int32(tile + (piece >> 3) * HALF + row * 32 + 4 * ((piece ^ row) & 7))
    place = (row >> 2 & 6) + (row & 1)  # of four rows, in the transposed tile's rows
    to = int32(turned + (row >> 5) * HALF + 4 * piece * 32 + 4 * (place ^ 4 * (piece & 1)))
    x = cuda.local.array((4, 4), float32)
    for i in range(4):
        x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load4(smem, (at ^ 8 * i) + 64 * i)
    for i in range(4):
        a, b, c, d = round_finite(x[0, i]), round_finite(x[1, i]), round_finite(x[2, i]), round_finite(x[3, i])
        store4(smem, (to ^ 4 * i) + 32 * i, a, b, c, d)


# Rows that a warp group owns ------------------------------------------------------------------------------------------


@cuda.jit(device=True, cache=True, forceinline=True)
def group_number():
    """Of this thread's warp group. From the warp's first lane, so that the compiler knows: what depends on it is the same in all
    lanes. A wgmma's place in shared memory is then computed in uniform registers, where it is wanted, and not brought there."""
    return int32(cuda.shfl_sync(FULL_MASK, int32(cuda.threadIdx.x) >> 7, 0))


@cuda.jit(device=True, cache=True, forceinline=True)
def group_row():
    """The first of this thread's two rows among the block's 128; the other is 8 below."""
    thread = int32(cuda.threadIdx.x)
    return int32((thread >> 5) * 16 + (thread >> 2 & 7))


@cuda.jit(device=True, cache=True, forceinline=True)
def copy_rows(smem, tile, source, first, stride, row0, T):
    """Start to copy a tile for each warp group: the block's rows, of which row0 is the first."""
    copy_block(smem, tile, source, first, stride, row0, T)
    copy_block(smem, tile + TILE, source, first, stride, int32(row0 + GROUP_ROWS), T)


@cuda.jit(device=True, cache=True, forceinline=True)
def rows_operand(a, smem, tile, factor):
    """a: the group's rows, of the two tiles that copy_rows has brought, times the factor, rounded."""
    g, t = int32(cuda.threadIdx.x) >> 2 & 7, int32(cuda.threadIdx.x) & 3
    row = int32(tile + group_number() * TILE + (group_row() & 63) * 32 + t)
    for k in range(8):
        for c in range(2):
            at = uint64(row + (k >> 2) * HALF + 4 * (2 * (k & 3) + c ^ g))  # unsigned: numba asks whether others are negative
            a[4 * k + 2 * c] = round_finite(smem[at] * factor)
            a[4 * k + 2 * c + 1] = round_finite(smem[at + uint64(8 * 32)] * factor)


@cuda.jit(device=True, cache=True, forceinline=True)
def store_rows(out, first, stride, row, T, acc, factor0, factor1):
    """out[first + row * stride :][:64] = factor * acc for the group's rows before T."""
    for r in range(2):
        factor = factor1 if r else factor0
        if int32(row + 8 * r) < T:
            at = first + int64(row + 8 * r) * stride + 2 * (int32(cuda.threadIdx.x) & 3)
            for j in range(8):
                store2(out, at + 8 * j, acc[4 * j + 2 * r] * factor, acc[4 * j + 2 * r + 1] * factor)


@cuda.jit(device=True, cache=True, forceinline=True)
def mask_above(s, diagonal):
    """Scores s whose column is more than `diagonal` right of this thread's first row."""
    limit = int32(diagonal - 2 * (int32(cuda.threadIdx.x) & 3))
    for i in range(32):
        if 8 * (i >> 2) + (i & 1) - 8 * (i >> 1 & 1) > limit:
            s[i] = MASKED


@cuda.jit(device=True, cache=True, forceinline=True)
def mask_below(s, diagonal):
    """Scores s whose column is less than `diagonal` right of this thread's first row: mask_above of the transpose."""
    limit = int32(diagonal - 2 * (int32(cuda.threadIdx.x) & 3))
    for i in range(32):
        if 8 * (i >> 2) + (i & 1) - 8 * (i >> 1 & 1) < limit:
            s[i] = MASKED
