"""Batched matrix products for the versions that hold the scores in memory, and the permutes around them."""

import functools

from kernels.device import ceil_div, cuda, float32, load4

TILE, DEPTH, THREADS = 64, 16, 256
PITCH = TILE + 4  # floats from a row in shared memory to the next


@functools.cache
def batched_matmul_kernel(trans_a, trans_b, triangle):
    """The kernel of `batched_matmul` for three facts that are known when it is compiled."""

    @cuda.jit(cache=True, fastmath=True)
    def kernel(out, a, b):
        I, J = out.shape[1], out.shape[2]
        K = a.shape[1] if trans_a else a.shape[2]
        z, i0, j0 = cuda.blockIdx.x, cuda.blockIdx.y * TILE, cuda.blockIdx.z * TILE
        if triangle == "out" and j0 > i0:
            return
        first = i0 if triangle == "above" else 0
        last = min(K, i0 + TILE) if triangle == "below" else K
        rows = cuda.shared.array((DEPTH, PITCH), float32, alignment=16)
        columns = cuda.shared.array((DEPTH, PITCH), float32, alignment=16)
        ty, tx = cuda.threadIdx.x >> 4, cuda.threadIdx.x & 15
        sums, x, y = cuda.local.array((4, 4), float32), cuda.local.array(4, float32), cuda.local.array(4, float32)
        for i in range(4):
            for j in range(4):
                sums[i, j] = float32(0)
        busy = i0 + 4 * ty < I and j0 + 4 * tx < J
        for k0 in range(first, last, DEPTH):
            for n in range(TILE * DEPTH // THREADS):
                e = cuda.threadIdx.x + n * THREADS  # neighbouring threads load neighbours in memory
                k, i = (e >> 6, e & 63) if trans_a else (e & 15, e >> 4)
                inside = k0 + k < last and i0 + i < I
                rows[k, i] = (a[z, k0 + k, i0 + i] if trans_a else a[z, i0 + i, k0 + k]) if inside else float32(0)
                k, j = (e & 15, e >> 4) if trans_b else (e >> 6, e & 63)
                inside = k0 + k < last and j0 + j < J
                columns[k, j] = (b[z, j0 + j, k0 + k] if trans_b else b[z, k0 + k, j0 + j]) if inside else float32(0)
            cuda.syncthreads()
            if busy:
                for k in range(DEPTH):
                    x[0], x[1], x[2], x[3] = load4(rows, k * PITCH + 4 * ty)
                    y[0], y[1], y[2], y[3] = load4(columns, k * PITCH + 4 * tx)
                    for i in range(4):
                        for j in range(4):
                            sums[i, j] += x[i] * y[j]
            cuda.syncthreads()
        for i in range(4):
            for j in range(4):
                if i0 + 4 * ty + i < I and j0 + 4 * tx + j < J:
                    out[z, i0 + 4 * ty + i, j0 + 4 * tx + j] = sums[i, j]

    return kernel


def batched_matmul(out, a, b, stream, trans_a=False, trans_b=False, triangle=""):
    """out[z] = a[z] @ b[z] for each z; all are 3-D float32, and transposed in memory where trans_a, trans_b say so.

    triangle names what is known to be zero, or not wanted, and is skipped in tiles of 64 rows and columns: "out", what is
    right of out's diagonal; "below", a is zero right of its diagonal; "above", a is zero left of it.
    """
    Z, I, J = out.shape
    grid = (Z, ceil_div(I, TILE), ceil_div(J, TILE))
    batched_matmul_kernel(trans_a, trans_b, triangle)[grid, THREADS, stream](out, a, b)


@cuda.jit(cache=True)
def split_kernel(head, inp, NH, p):
    i = cuda.grid(1)
    _, T, hs = head.shape
    if i < head.size:
        z, t, c = i // (T * hs), i // hs % T, i % hs
        head[z, t, c] = inp[z // NH, t, (p * NH + z % NH) * hs + c]


@cuda.jit(cache=True)
def join_kernel(out, head, NH, p):
    i = cuda.grid(1)
    _, T, hs = head.shape
    if i < head.size:
        z, t, c = i // (T * hs), i // hs % T, i % hs
        out[z // NH, t, (p * NH + z % NH) * hs + c] = head[z, t, c]


def split_heads(head, inp, NH, p, stream):
    """head (B*NH, T, hs) = part p of inp (B, T, parts*NH*hs): 0, 1, 2 are q, k, v of qkv."""
    split_kernel[ceil_div(head.size, THREADS), THREADS, stream](head, inp, NH, p)


def join_heads(out, head, NH, p, stream):
    """Part p of out = head: what split_heads takes apart."""
    join_kernel[ceil_div(head.size, THREADS), THREADS, stream](out, head, NH, p)
