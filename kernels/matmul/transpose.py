"""The transpose of an operand. Tensor cores read TF32 from shared memory along K alone (PTX ISA, wgmma: only 16-bit types may lie
the other way), so a product whose operands lie along M and N pays for every tile, or once, here, for the smaller operand."""

from kernels.device import ceil_div, cuda, float32, load4, need, scratch, store4, to_tf32
from kernels.matmul.engine import is_aligned

TILE = 64


@cuda.jit(cache=True)
def transpose_kernel(out, inp, rounded):
    """out (C,N) = inp (N,C).T: 64 x 64 elements a block of 256 threads, of which each has four 16-byte loads on the way before
    its first store. A row of the tile is 65 long: neither pass has more than two lanes in a bank."""
    tile = cuda.shared.array((64, 65), float32)
    x, y = 4 * (cuda.threadIdx.x % 16), cuda.threadIdx.x // 16
    n, c = cuda.blockIdx.y * TILE, cuda.blockIdx.x * TILE
    N, C = inp.shape
    for i in range(4):
        row = y + 16 * i
        if n + row < N and c + x < C:
            tile[x, row], tile[x + 1, row], tile[x + 2, row], tile[x + 3, row] = load4(inp, (n + row) * C + c + x)
    cuda.syncthreads()
    for i in range(4):
        row = y + 16 * i
        if c + row < C and n + x < N:
            a, b, d, e = tile[row, x], tile[row, x + 1], tile[row, x + 2], tile[row, x + 3]
            if rounded:
                a, b, d, e = to_tf32(a), to_tf32(b), to_tf32(d), to_tf32(e)
            store4(out, (c + row) * N + n + x, a, b, d, e)


def transpose(inp, stream=0, rounded: bool = True):
    """A scratch array (C,N) that holds the transpose of inp (N,C), rounded to TF32 or as it is; N and C multiples of 4."""
    N, C = inp.shape
    sentence = f"needs channels and rows in multiples of 4 to transpose, got {N} x {C}, in an array aligned to 16 bytes"
    need(N % 4 == 0 and is_aligned(inp), sentence)
    out = scratch("matmul transpose", (C, N))
    transpose_kernel[(ceil_div(C, TILE), ceil_div(N, TILE)), 256, stream](out, inp, rounded)
    return out
