"""Tiles of 64 rows of a head in shared memory, and products with them in float32: what the fp32 flash kernels are made of.

The flash kernels run blocks of 256 threads: thread (ty, tx), 16 by 16. A tile's row holds hs floats and 4 more, which
nobody reads: they move each row's banks on by four.
"""

from kernels.device import FULL_MASK, cuda, float32, load4, store4

ROWS = 64
THREADS = 256
SCORES = ROWS * 68  # floats that lay_down fills


@cuda.jit(device=True, cache=True, forceinline=True)
def load_tile(tile, base, source, first, stride, valid, hs):
    """Rows source[first + row * stride :][:hs] to the tile at base; those from `valid` on are zeros."""
    for i in range(ROWS * hs // 4 // THREADS):
        piece = cuda.threadIdx.x + i * THREADS
        row, column = piece // (hs // 4), piece % (hs // 4) * 4
        a, b, c, d = float32(0), float32(0), float32(0), float32(0)
        if row < valid:
            a, b, c, d = load4(source, first + row * stride + column)
        store4(tile, base + row * (hs + 4) + column, a, b, c, d)


@cuda.jit(device=True, cache=True, forceinline=True)
def rows_product(s, smem, a, b, hs, valid):
    """s[i, j] = row 4 ty + i of the tile at a, if that is less than valid, times row tx + 16 j of the tile at b."""
    ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
    x, y = cuda.local.array((4, 4), float32), cuda.local.array((4, 4), float32)
    for i in range(4):
        for j in range(4):
            s[i, j] = float32(0)
    for k in range(0, hs if 4 * ty < valid else 0, 4):
        for i in range(4):
            x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load4(smem, a + (4 * ty + i) * (hs + 4) + k)
            y[i, 0], y[i, 1], y[i, 2], y[i, 3] = load4(smem, b + (tx + 16 * i) * (hs + 4) + k)
        for i in range(4):
            for j in range(4):
                for c in range(4):
                    s[i, j] += x[i, c] * y[j, c]


@cuda.jit(device=True, cache=True, forceinline=True)
def lay_down(s, smem, p):
    """s as rows_product leaves it to rows 4 ty + i, columns tx + 16 j of the 64 x 68 floats at p, for columns_product."""
    ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
    cuda.syncwarp()  # a row is written and read by the 16 lanes of one ty
    for i in range(4):
        for j in range(4):
            smem[p + (4 * ty + i) * 68 + tx + 16 * j] = s[i, j]
    cuda.syncwarp()


@cuda.jit(device=True, cache=True, forceinline=True)
def columns_product(o, smem, p, b, hs, valid):
    """o[i, c] += row 4 ty + i of what lies at p, if that is less than valid, times column 64 (c / 4) + 4 tx + c % 4 of the
    tile at b."""
    ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
    x = cuda.local.array((4, 4), float32)
    for k in range(0, ROWS if 4 * ty < valid else 0, 4):
        for i in range(4):
            x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load4(smem, p + (4 * ty + i) * 68 + k)
        for c in range(o.shape[1] // 4):
            column = 64 * c + 4 * tx
            if column < hs:
                for j in range(4):
                    y0, y1, y2, y3 = load4(smem, b + (k + j) * (hs + 4) + column)
                    for i in range(4):
                        o[i, 4 * c] += x[i, j] * y0
                        o[i, 4 * c + 1] += x[i, j] * y1
                        o[i, 4 * c + 2] += x[i, j] * y2
                        o[i, 4 * c + 3] += x[i, j] * y3


@cuda.jit(device=True, cache=True, forceinline=True)
def store_tile(out, first, stride, valid, hs, o, factors):
    """out[first + row * stride :][:hs] = factors[i] * o for the rows that this thread has sums of, but those from `valid` on."""
    ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
    for i in range(4):
        for c in range(o.shape[1] // 4):
            column = 64 * c + 4 * tx
            if column < hs and 4 * ty + i < valid:
                f = factors[i]
                at = first + (4 * ty + i) * stride + column
                store4(out, at, o[i, 4 * c] * f, o[i, 4 * c + 1] * f, o[i, 4 * c + 2] * f, o[i, 4 * c + 3] * f)


@cuda.jit(device=True, cache=True, forceinline=True)
def row_max(x):
    """The maximum over the 16 threads of one ty."""
    offset = 8
    while offset > 0:
        x = max(x, cuda.shfl_xor_sync(FULL_MASK, x, offset))
        offset //= 2
    return x


@cuda.jit(device=True, cache=True, forceinline=True)
def row_sum(x):
    """The sum over the 16 threads of one ty."""
    offset = 8
    while offset > 0:
        x += cuda.shfl_xor_sync(FULL_MASK, x, offset)
        offset //= 2
    return x
