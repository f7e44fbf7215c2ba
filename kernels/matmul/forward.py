"""Matmul forward: out = inp @ weight.T + bias, and the same with GELU or a residual in its epilogue.

version 0: cuBLASLt, the bar
version 1: a thread an element of out; neighbouring threads take neighbouring rows, whose elements lie C apart
version 2: neighbouring threads take neighbouring columns: they share inp's element, and store side by side
version 3: 32 x 32 tiles of both matrices in shared memory: each element is read from memory C / 32 times less often
version 4: a thread eight elements of a column: an element of weight, once in a register, serves eight sums
version 5: a thread 8 x 8 elements: 16 reads of shared memory for 64 multiply-adds
version 6: 16-byte loads; tiles transposed on the way into shared memory, so that it is read 16 bytes at a time too
version 7: a warp's tile, dealt to its lanes so that no two of them meet in a bank, with the next tile on its way in registers
version 8: cp.async brings tiles while the sums go on, three stages deep, and 16 x 8 elements a thread (kernels/matmul/engine.py)
version 9: TF32 on the tensor cores, mma.sync, a fragment a load: ldmatrix
version 10: the engine with mma.sync: four stages, warps' tiles of 64 x 64, roundings between the products, split K
version 11: its epilogue: bias, bias and GELU, bias and residual (in version 10 the bias is there already)
version 12: wgmma: four warps together, the weight read from shared memory by the tensor core (kernels/matmul/wgmma.py), which
    cuts it off to TF32 where all others round to nearest
version 13: both operands brought, and rounded, by the tensor memory accelerator, for which one thread asks (kernels/matmul/tma.py)
version 14: cuBLASLt or version 13, what is faster at the shape (kernels/matmul/faster.py)
version 15: the digits of fp32 out of the tensor cores: the engine with three products of TF32 for each (kernels/matmul/cores.py)
version 16: the same with version 13's wgmma and TMA
"""

import numpy as np

import cpu_reference
from kernels import cublas
from kernels.device import (
    ceil_div,
    cuda,
    float32,
    int32,
    ldmatrix_x2,
    ldmatrix_x4,
    load4,
    mma_tf32,
    need,
    store4,
    to_tf32,
)
from kernels.gelu.forward import gelu_forward
from kernels.matmul import engine, tma, wgmma
from kernels.matmul.epilogue import BIAS, BIAS_GELU, BIAS_RESIDUAL, STORE
from kernels.matmul.faster import faster_of, missing
from kernels.op import Op
from kernels.reduce import whole_warps


def forward_inputs(rng, N, C, OC):
    return {
        "inp": rng.standard_normal((N, C), dtype=np.float32),
        "weight": rng.standard_normal((OC, C), dtype=np.float32),
        "bias": rng.standard_normal(OC, dtype=np.float32),
    }


def product_bytes(N, C, OC) -> int:
    """Each of the three matrices once."""
    return 4 * (N * C + OC * C + N * OC)


def product_flops(N, C, OC) -> int:
    return 2 * N * C * OC


def sizes_of(arguments: dict) -> dict:
    """The shape that the arguments of a product have, forward or backward: weight (OC,C), and the rows of the others."""
    OC, C = arguments["dweight" if "dweight" in arguments else "weight"].shape
    return {"N": arguments["dout" if "dout" in arguments else "out"].shape[0], "C": C, "OC": OC}


QKV, ATTPROJ, FC, FCPROJ, HEAD = (  # GPT-2 124M's five products, B*T = 4096
    {"N": 4096, "C": C, "OC": OC} for C, OC in ((768, 2304), (768, 768), (768, 3072), (3072, 768), (768, 50304))
)
CUBE = {"N": 8192, "C": 8192, "OC": 8192}
SMALL = {"N": 20, "C": 36, "OC": 44}  # no tile and no block divides them
ODD = [{"N": N, "C": C, "OC": OC} for N, C, OC in ((1, 33, 100), (33, 1, 1), (3, 100, 33), (70, 36, 68), (1, 4, 1))]

matmul_forward = Op(
    reference=cpu_reference.matmul_forward,
    inputs=forward_inputs,
    outputs=lambda N, C, OC: {"out": (N, OC)},
    bytes_moved=product_bytes,
    flops=product_flops,
    sizes=sizes_of,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[QKV, ATTPROJ, FC, FCPROJ, HEAD],
    large=[CUBE],
)

matmul_gelu_forward = Op(
    reference=cpu_reference.matmul_gelu_forward,
    inputs=forward_inputs,
    outputs=lambda N, C, OC: {"out": (N, OC), "pre": (N, OC)},
    bytes_moved=lambda N, C, OC: product_bytes(N, C, OC) + 4 * N * OC,
    flops=product_flops,
    sizes=sizes_of,
    shape=FC,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[FC],
)

matmul_residual_forward = Op(
    reference=cpu_reference.matmul_residual_forward,
    inputs=lambda rng, N, C, OC: forward_inputs(rng, N, C, OC) | {"residual": rng.standard_normal((N, OC), dtype=np.float32)},
    outputs=lambda N, C, OC: {"out": (N, OC)},
    bytes_moved=lambda N, C, OC: product_bytes(N, C, OC) + 4 * N * OC,
    flops=product_flops,
    sizes=sizes_of,
    shape=FCPROJ,
    small=SMALL,
    odd=ODD,
    trainer_shapes=[ATTPROJ, FCPROJ],
)


@matmul_forward.version(0, "cuBLASLt, bias in the epilogue", precision="either", needs=cublas.missing)
def matmul_forward0(out, inp, weight, bias, *, tf32=True, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    epilogue = "DEFAULT" if bias is None else "BIAS"
    out, inp, weight = map(cublas.Matrix.of, (out, inp, weight))
    cublas.product(out, inp, weight, trans_b=True, epilogue=epilogue, bias=bias, tf32=tf32, stream=stream)


@matmul_gelu_forward.version(0, "cuBLASLt, bias and GELU in the epilogue", precision="either", needs=cublas.missing)
def matmul_gelu_forward0(out, pre, inp, weight, bias, *, tf32=True, stream=0):
    """out, pre (N,OC), inp (N,C), weight (OC,C), bias (OC,): float32, on the device; OC a multiple of 8."""
    out, pre, inp, weight = map(cublas.Matrix.of, (out, pre, inp, weight))
    cublas.product(
        out, inp, weight, trans_b=True, epilogue="GELU_AUX_BIAS", bias=bias, aux=pre, tf32=tf32, stream=stream
    )


@matmul_residual_forward.version(0, "cuBLASLt, bias in the epilogue, the residual as C", precision="either", needs=cublas.missing)
def matmul_residual_forward0(out, inp, weight, bias, residual, *, tf32=True, stream=0):
    """out, residual (N,OC), inp (N,C), weight (OC,C), bias (OC,): float32, on the device."""
    out, inp, weight, residual = map(cublas.Matrix.of, (out, inp, weight, residual))
    cublas.product(
        out, inp, weight, trans_b=True, add=residual, epilogue="BIAS", bias=bias, tf32=tf32, stream=stream
    )


# Versions 1 to 9 add the bias, where there is one, as their sums end: `bias_of` keeps None out of the kernels.


@cuda.jit(cache=True, fastmath=True)
def matmul_forward_kernel1(out, inp, weight, bias, has_bias):
    n, o = cuda.grid(2)
    N, C = inp.shape
    if n < N and o < weight.shape[0]:
        total = bias[o] if has_bias else float32(0)
        for c in range(C):
            total += inp[n, c] * weight[o, c]
        out[n, o] = total


@matmul_forward.version(1, "a thread an element of out")
def matmul_forward1(out, inp, weight, bias, *, block_size=256, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    (N, OC), block = out.shape, (32, whole_warps(block_size))
    grid = ceil_div(N, block[0]), ceil_div(OC, block[1])
    matmul_forward_kernel1[grid, block, stream](out, inp, weight, *bias_of(bias, weight))


def bias_of(bias, weight):
    """(an array, is it the bias?): a kernel's arguments for a bias that may be None."""
    return (weight[0], False) if bias is None else (bias, True)


def ending_of(bias) -> int:
    """The engines' epilogue for a bias that may be None."""
    return STORE if bias is None else BIAS


@cuda.jit(cache=True, fastmath=True)
def matmul_forward_kernel2(out, inp, weight, bias, has_bias):
    o, n = cuda.grid(2)
    N, C = inp.shape
    if n < N and o < weight.shape[0]:
        total = bias[o] if has_bias else float32(0)
        for c in range(C):
            total += inp[n, c] * weight[o, c]
        out[n, o] = total


@matmul_forward.version(2, "neighbouring threads take neighbouring columns")
def matmul_forward2(out, inp, weight, bias, *, block_size=256, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    (N, OC), block = out.shape, (32, whole_warps(block_size))
    grid = ceil_div(OC, block[0]), ceil_div(N, block[1])
    matmul_forward_kernel2[grid, block, stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(cache=True, fastmath=True)
def matmul_forward_kernel3(out, inp, weight, bias, has_bias):
    inp_tile = cuda.shared.array((32, 32), float32)
    weight_tile = cuda.shared.array((32, 33), float32)  # 33: a column of it then lies in 32 different banks
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    o, n = cuda.grid(2)
    first = cuda.blockIdx.x * 32
    (N, C), OC = inp.shape, weight.shape[0]
    total = float32(0)
    for c in range(0, C, 32):
        inp_tile[y, x] = inp[n, c + x] if n < N and c + x < C else float32(0)
        weight_tile[y, x] = weight[first + y, c + x] if first + y < OC and c + x < C else float32(0)
        cuda.syncthreads()
        for k in range(32):
            total += inp_tile[y, k] * weight_tile[x, k]
        cuda.syncthreads()
    if n < N and o < OC:
        out[n, o] = total + bias[o] if has_bias else total


@matmul_forward.version(3, "32 x 32 tiles in shared memory")
def matmul_forward3(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    N, OC = out.shape
    grid = ceil_div(OC, 32), ceil_div(N, 32)
    matmul_forward_kernel3[grid, (32, 32), stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(cache=True, fastmath=True, launch_bounds=(512,))
def matmul_forward_kernel4(out, inp, weight, bias, has_bias):
    """64 x 64 elements a block; thread (x, y) has rows 8 y to 8 y + 7 of column x."""
    inp_tile = cuda.shared.array((64, 8), float32)
    weight_tile = cuda.shared.array((8, 65), float32)
    sums = cuda.local.array(8, float32)
    x, y = cuda.threadIdx.x % 64, cuda.threadIdx.x // 64
    row, k0 = cuda.threadIdx.x // 8, cuda.threadIdx.x % 8  # what this thread loads
    n, o = cuda.blockIdx.y * 64, cuda.blockIdx.x * 64
    (N, C), OC = inp.shape, weight.shape[0]
    for i in range(8):
        sums[i] = float32(0)
    for c in range(0, C, 8):
        inp_tile[row, k0] = inp[n + row, c + k0] if n + row < N and c + k0 < C else float32(0)
        weight_tile[k0, row] = weight[o + row, c + k0] if o + row < OC and c + k0 < C else float32(0)
        cuda.syncthreads()
        for k in range(8):
            w = weight_tile[k, x]
            for i in range(8):
                sums[i] += inp_tile[8 * y + i, k] * w
        cuda.syncthreads()
    for i in range(8):
        if n + 8 * y + i < N and o + x < OC:
            out[n + 8 * y + i, o + x] = sums[i] + bias[o + x] if has_bias else sums[i]


@matmul_forward.version(4, "a thread eight elements of a column")
def matmul_forward4(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    N, OC = out.shape
    matmul_forward_kernel4[(ceil_div(OC, 64), ceil_div(N, 64)), 512, stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(cache=True, fastmath=True, launch_bounds=(256,))
def matmul_forward_kernel5(out, inp, weight, bias, has_bias):
    """128 x 128 elements a block; thread (x, y) has rows 8 y to 8 y + 7 of columns 8 x to 8 x + 7."""
    inp_tile = cuda.shared.array((8, 132), float32)
    weight_tile = cuda.shared.array((8, 132), float32)
    sums = cuda.local.array((8, 8), float32)
    a = cuda.local.array(8, float32)
    b = cuda.local.array(8, float32)
    x, y = cuda.threadIdx.x % 16, cuda.threadIdx.x // 16
    k0 = cuda.threadIdx.x % 8
    n, o = cuda.blockIdx.y * 128, cuda.blockIdx.x * 128
    (N, C), OC = inp.shape, weight.shape[0]
    for i in range(8):
        for j in range(8):
            sums[i, j] = float32(0)
    for c in range(0, C, 8):
        for row in range(cuda.threadIdx.x // 8, 128, 32):
            inp_tile[k0, row] = inp[n + row, c + k0] if n + row < N and c + k0 < C else float32(0)
            weight_tile[k0, row] = weight[o + row, c + k0] if o + row < OC and c + k0 < C else float32(0)
        cuda.syncthreads()
        for k in range(8):
            for i in range(8):
                a[i] = inp_tile[k, 8 * y + i]
                b[i] = weight_tile[k, 8 * x + i]
            for i in range(8):
                for j in range(8):
                    sums[i, j] += a[i] * b[j]
        cuda.syncthreads()
    for i in range(8):
        for j in range(8):
            if n + 8 * y + i < N and o + 8 * x + j < OC:
                b_j = bias[o + 8 * x + j] if has_bias else float32(0)
                out[n + 8 * y + i, o + 8 * x + j] = sums[i, j] + b_j


@matmul_forward.version(5, "a thread 8 x 8 elements")
def matmul_forward5(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    N, OC = out.shape
    matmul_forward_kernel5[(ceil_div(OC, 128), ceil_div(N, 128)), 256, stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(device=True, cache=True)
def load_row4(matrix, row, c):
    """Four neighbours of a row, or zeros past the last row or column; the number of columns a multiple of 4."""
    rows, C = matrix.shape
    if row < rows and c < C:
        return load4(matrix, row * C + c)
    return float32(0), float32(0), float32(0), float32(0)


@cuda.jit(cache=True, fastmath=True, launch_bounds=(256,))
def matmul_forward_kernel6(out, inp, weight, bias, has_bias):
    """Version 5, 16 bytes at a time: a thread loads four neighbours of a row and stores them below each other."""
    inp_tile = cuda.shared.array((8, 128), float32, alignment=16)
    weight_tile = cuda.shared.array((8, 128), float32, alignment=16)
    sums = cuda.local.array((8, 8), float32)
    a = cuda.local.array(8, float32)
    b = cuda.local.array(8, float32)
    x, y = cuda.threadIdx.x % 16, cuda.threadIdx.x // 16
    row, k0 = cuda.threadIdx.x // 2, cuda.threadIdx.x % 2 * 4
    n, o = cuda.blockIdx.y * 128, cuda.blockIdx.x * 128
    C = inp.shape[1]
    for i in range(8):
        for j in range(8):
            sums[i, j] = float32(0)
    for c in range(0, C, 8):
        v = load_row4(inp, n + row, c + k0)
        w = load_row4(weight, o + row, c + k0)
        for k in range(4):
            inp_tile[k0 + k, row] = v[k]
            weight_tile[k0 + k, row] = w[k]
        cuda.syncthreads()
        for k in range(8):
            for i in range(0, 8, 4):
                a[i], a[i + 1], a[i + 2], a[i + 3] = load4(inp_tile, k * 128 + 8 * y + i)
                b[i], b[i + 1], b[i + 2], b[i + 3] = load4(weight_tile, k * 128 + 8 * x + i)
            for i in range(8):
                for j in range(8):
                    sums[i, j] += a[i] * b[j]
        cuda.syncthreads()
    for i in range(8):
        for j in range(0, 8, 4):
            store_row4(
                out, n + 8 * y + i, o + 8 * x + j, bias, has_bias, sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3]
            )


@cuda.jit(device=True, cache=True)
def store_row4(out, n, o, bias, has_bias, x0, x1, x2, x3):
    """Adds the bias and stores four neighbours of a row, where out has them; the number of columns a multiple of 4."""
    N, OC = out.shape
    if n < N and o < OC:
        if has_bias:
            x0, x1, x2, x3 = x0 + bias[o], x1 + bias[o + 1], x2 + bias[o + 2], x3 + bias[o + 3]
        store4(out, n * OC + o, x0, x1, x2, x3)


def need_fours(out, inp, weight):
    need(inp.shape[1] % 4 == 0 and out.shape[1] % 4 == 0, "needs C and OC to be multiples of 4")
    need(engine.is_aligned(out, inp, weight), "needs arrays that start at a multiple of 16 bytes")


@matmul_forward.version(6, "16-byte loads, shared tiles transposed")
def matmul_forward6(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device; C and OC multiples of 4."""
    need_fours(out, inp, weight)
    N, OC = out.shape
    matmul_forward_kernel6[(ceil_div(OC, 128), ceil_div(N, 128)), 256, stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(cache=True, fastmath=True, launch_bounds=(256,))
def matmul_forward_kernel7(out, inp, weight, bias, has_bias):
    """A warp 64 x 32 elements; lane 4 y + x rows 4 y and columns 4 x of each 32 x 16 of them, four at a time. What a warp
    reads of a row of a tile are 32 or 16 neighbours. The row of a tile is 132 long: stores of two k meet in no bank."""
    inp_tile = cuda.shared.array((2, 8, 132), float32, alignment=16)
    weight_tile = cuda.shared.array((2, 8, 132), float32, alignment=16)
    sums = cuda.local.array((8, 8), float32)
    a = cuda.local.array(8, float32)
    b = cuda.local.array(8, float32)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    y, x = warp // 4 * 64 + lane // 4 * 4, warp % 4 * 32 + lane % 4 * 4
    row, k0 = cuda.threadIdx.x // 2, cuda.threadIdx.x % 2 * 4
    n, o = cuda.blockIdx.y * 128, cuda.blockIdx.x * 128
    C = inp.shape[1]
    for i in range(8):
        for j in range(8):
            sums[i, j] = float32(0)
    v, w = load_row4(inp, n + row, k0), load_row4(weight, o + row, k0)
    now = 0
    for c in range(0, C, 8):
        for k in range(4):
            inp_tile[now, k0 + k, row] = v[k]
            weight_tile[now, k0 + k, row] = w[k]
        cuda.syncthreads()  # one barrier a tile: the next one is stored into the other half
        v, w = load_row4(inp, n + row, c + 8 + k0), load_row4(weight, o + row, c + 8 + k0)
        for k in range(8):
            for i in range(2):
                at = (now * 8 + k) * 132
                a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3] = load4(inp_tile, at + y + 32 * i)
                b[4 * i], b[4 * i + 1], b[4 * i + 2], b[4 * i + 3] = load4(weight_tile, at + x + 16 * i)
            for i in range(8):
                for j in range(8):
                    sums[i, j] += a[i] * b[j]
        now = 1 - now
    for i in range(8):
        for j in range(0, 8, 4):
            r, column = n + y + i // 4 * 32 + i % 4, o + x + 4 * j
            store_row4(out, r, column, bias, has_bias, sums[i, j], sums[i, j + 1], sums[i, j + 2], sums[i, j + 3])


@matmul_forward.version(7, "a warp's tile without bank conflicts, the next tile in registers")
def matmul_forward7(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device; C and OC multiples of 4."""
    need_fours(out, inp, weight)
    N, OC = out.shape
    matmul_forward_kernel7[(ceil_div(OC, 128), ceil_div(N, 128)), 256, stream](out, inp, weight, *bias_of(bias, weight))


@cuda.jit(cache=True, fastmath=True, launch_bounds=(128,))
def matmul_forward_kernel9(out, inp, weight, bias, has_bias):
    """64 x 64 elements a block, 32 x 32 of them each of its four warps: 2 x 4 products of 16 x 8. Tiles 32 deep, padded to
    36, so that the eight rows of 16 bytes that ldmatrix reads at once lie in eight different places of the banks."""
    inp_tile = cuda.shared.array((64, 36), float32, alignment=16)
    weight_tile = cuda.shared.array((64, 36), float32, alignment=16)
    sums = cuda.local.array((2, 4, 4), float32)
    lane, warp = int32(cuda.threadIdx.x % 32), int32(cuda.threadIdx.x // 32)
    y, x = warp // 2 * 32, warp % 2 * 32
    n, o = cuda.blockIdx.y * 64, cuda.blockIdx.x * 64
    (N, C), OC = inp.shape, weight.shape[0]
    for i in range(2):
        for j in range(4):
            for k in range(4):
                sums[i, j, k] = float32(0)
    for c in range(0, C, 32):
        for row in range(warp, 64, 4):
            inp_tile[row, lane] = to_tf32(inp[n + row, c + lane] if n + row < N and c + lane < C else float32(0))
            weight_tile[row, lane] = to_tf32(weight[o + row, c + lane] if o + row < OC and c + lane < C else float32(0))
        cuda.syncthreads()
        for k in range(0, 32, 8):
            for i in range(2):
                a0, a1, a2, a3 = ldmatrix_x4(inp_tile, (y + 16 * i + lane % 16) * 36 + k + lane // 16 * 4)
                for j in range(4):
                    b0, b1 = ldmatrix_x2(weight_tile, (x + 8 * j + lane % 8) * 36 + k + lane % 16 // 8 * 4)
                    sums[i, j, 0], sums[i, j, 1], sums[i, j, 2], sums[i, j, 3] = mma_tf32(
                        sums[i, j, 0], sums[i, j, 1], sums[i, j, 2], sums[i, j, 3], a0, a1, a2, a3, b0, b1
                    )
        cuda.syncthreads()
    for i in range(2):
        for j in range(4):
            for k in range(4):
                row, column = n + y + 16 * i + lane // 4 + k // 2 * 8, o + x + 8 * j + lane % 4 * 2 + k % 2
                if row < N and column < OC:
                    out[row, column] = sums[i, j, k] + bias[column] if has_bias else sums[i, j, k]


@matmul_forward.version(9, "TF32 mma.sync out of padded shared tiles", precision="tf32", needs_cc=(8, 0))
def matmul_forward9(out, inp, weight, bias, *, stream=0):
    """out (N,OC), inp (N,C), weight (OC,C), bias (OC,) or None: float32, on the device."""
    N, OC = out.shape
    matmul_forward_kernel9[(ceil_div(OC, 64), ceil_div(N, 64)), 128, stream](out, inp, weight, *bias_of(bias, weight))


@matmul_forward.version(8, "cp.async, three stages deep", needs_cc=(8, 0))
def matmul_forward8(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0."""
    engine.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, tf32=0, stream=stream)


@matmul_forward.version(10, "TF32 mma.sync in the engine: swizzled tiles, split K", precision="tf32", needs_cc=(8, 0))
def matmul_forward10(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0."""
    engine.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, stream=stream)


@matmul_forward.version(12, "TF32 wgmma, the weight cut off", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_forward12(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0; C and OC multiples of 4."""
    wgmma.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, stream=stream)


@matmul_forward.version(13, "TF32 wgmma, fed by TMA", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_forward13(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, stream=stream)


@matmul_forward.version(
    14, "cuBLASLt or version 13, the faster at the shape", precision="tf32", needs_cc=(9, 0), needs=missing, chooses=True
)
def matmul_forward14(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0."""
    faster_of((matmul_forward0, matmul_forward13), out, inp, weight, bias, stream=stream)


@matmul_forward.version(15, "fp32's digits from three products of mma.sync", precision="3xtf32", needs_cc=(8, 0))
def matmul_forward15(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0."""
    engine.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, tf32=3, stream=stream)


@matmul_forward.version(
    16, "fp32's digits from three of wgmma, fed by TMA", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_forward16(out, inp, weight, bias, *, stream=0):
    """As matmul_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=ending_of(bias), bias=bias, tf32=3, stream=stream)


# The fused ops: first in two steps, which the others have to beat.


@matmul_gelu_forward.version(1, "two kernels: cuBLASLt, then our GELU", precision="either", needs=cublas.missing)
def matmul_gelu_forward1(out, pre, inp, weight, bias, *, tf32=True, stream=0):
    """As matmul_gelu_forward0, any OC."""
    matmul_forward0(pre, inp, weight, bias, tf32=tf32, stream=stream)
    gelu_forward.versions[3](out.reshape(out.size), pre.reshape(pre.size), stream=stream)


@matmul_gelu_forward.version(8, "bias and GELU as the sums are stored", needs_cc=(8, 0))
def matmul_gelu_forward8(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0, any OC."""
    engine.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, tf32=0, stream=stream)


@matmul_gelu_forward.version(11, "TF32, bias and GELU as the sums are stored", precision="tf32", needs_cc=(8, 0))
def matmul_gelu_forward11(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0, any OC."""
    engine.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, stream=stream)


@matmul_gelu_forward.version(12, "wgmma, the weight cut off", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_gelu_forward12(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0; C and OC multiples of 4."""
    wgmma.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, stream=stream)


@matmul_gelu_forward.version(13, "wgmma, fed by TMA", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_gelu_forward13(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, stream=stream)


@matmul_gelu_forward.version(15, "three products of mma.sync, bias and GELU", precision="3xtf32", needs_cc=(8, 0))
def matmul_gelu_forward15(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0, any OC."""
    engine.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, tf32=3, stream=stream)


@matmul_gelu_forward.version(
    16, "three products of wgmma, bias and GELU", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_gelu_forward16(out, pre, inp, weight, bias, *, stream=0):
    """As matmul_gelu_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=BIAS_GELU, bias=bias, extra=pre, tf32=3, stream=stream)


@matmul_residual_forward.version(8, "bias and residual as the sums are stored", needs_cc=(8, 0))
def matmul_residual_forward8(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0."""
    engine.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, tf32=0, stream=stream)


@matmul_residual_forward.version(11, "TF32, bias and residual as the sums are stored", precision="tf32", needs_cc=(8, 0))
def matmul_residual_forward11(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0."""
    engine.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, stream=stream)


@matmul_residual_forward.version(12, "wgmma, the weight cut off", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_residual_forward12(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0; C and OC multiples of 4."""
    wgmma.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, stream=stream)


@matmul_residual_forward.version(13, "wgmma, fed by TMA", precision="tf32", needs_cc=(9, 0), needs=wgmma.missing)
def matmul_residual_forward13(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, stream=stream)


@matmul_residual_forward.version(15, "three products of mma.sync, bias and residual", precision="3xtf32", needs_cc=(8, 0))
def matmul_residual_forward15(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0."""
    engine.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, tf32=3, stream=stream)


@matmul_residual_forward.version(
    16, "three products of wgmma, bias and residual", precision="3xtf32", needs_cc=(9, 0), needs=wgmma.missing
)
def matmul_residual_forward16(out, inp, weight, bias, residual, *, stream=0):
    """As matmul_residual_forward0; C and OC multiples of 4."""
    tma.multiply(out, inp, weight, epilogue=BIAS_RESIDUAL, bias=bias, extra=residual, tf32=3, stream=stream)
