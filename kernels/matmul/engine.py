"""The engine of versions 8, 10, 11 and 15: one kernel for all three products, whatever core the warps multiply with (cores.py).

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K) or, if b_m_major, (K,N)

Each block makes a BM x BN tile of out, each of its warps a WM x WN tile of that, walking along K in steps of BK. While the
warps multiply one step, cp.async brings the next ones into shared memory; at the end of a tile these are the first steps of
the block's next tile.
"""

import functools

from kernels.device import (
    address,
    big_shared,
    ceil_div,
    cp_async_commit,
    cp_async_wait,
    cuda,
    float32,
    int32,
    int64,
    keep_compiled,
    load4,
    multiprocessors,
    scratch,
    shared_limit,
)  # fmt: skip
from kernels.intrinsics import ptx
from kernels.matmul.cores import fp32_core, tensor_core, three_products_core
from kernels.matmul.epilogue import STORE, epilogue_of
from kernels.matmul.tiles import BK, Tile, copy_tile


@ptx("div.s32 $0, $1, $2;", returns=int32, takes=(int32, int32), pure=True)
def quotient(x, y):
    """x // y of two that are not negative, in 32 bits. Numba's own has 64, and is a function call."""
    return x // y


GROUP = 8  # rows of tiles that blocks walk along together, so that L2 serves them


@functools.cache
def kernel(tile: Tile, a_m_major: bool, b_m_major: bool, a_aligned: bool, b_aligned: bool, epilogue: int, out_aligned: bool):
    BM, BN, WM, WN, STAGES, TF32 = tile.BM, tile.BN, tile.WM, tile.WN, tile.stages, tile.tf32
    A_SIZE, STAGE = tile.size(BM, a_m_major), tile.size(BM, a_m_major) + tile.size(BN, b_m_major)
    AHEAD = STAGES - 2
    if TF32:  # a step of BK is multiplied in SLICES, UNROLL of them in a row, and copied in PARTS
        SLICES, UNROLL, PARTS = BK // 8, 4, 4
        core = (three_products_core if TF32 == 3 else tensor_core)(tile, a_m_major, b_m_major, epilogue, out_aligned)
    else:
        SLICES, UNROLL, PARTS = BK, 8, 8
        core = fp32_core(tile, epilogue, out_aligned)
    A, B, SUMS, STORES, read, prepare, multiply_first, multiply, gather, store_part = core
    EACH = PARTS * UNROLL // SLICES
    COPY_PARTS = 1 if a_m_major and b_m_major and not TF32 else PARTS  # few copies, of 16 bytes: the first part has them all
    copy_a = copy_tile(a_m_major, BM, tile.threads, a_aligned, TF32 > 0, COPY_PARTS)
    copy_b = copy_tile(b_m_major, BN, tile.threads, b_aligned, TF32 > 0, COPY_PARTS)

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
    def first_slice_on(sums, a, b, next_a, next_b, shared, now, row, column, s, k, lane):
        """Read slice s + k, and multiply the one before, the first of an unrolled few."""
        read(next_a, next_b, shared, now, now + A_SIZE, row, column, s, k, lane)
        multiply_first(sums, a, b, next_b)

    @cuda.jit(device=True)
    def slice_on(sums, a, b, next_a, next_b, shared, now, row, column, s, k, lane):
        """The same with any other."""
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
        prepare(b0)
        for item in range(int32(cuda.blockIdx.x), items, int32(cuda.gridDim.x)):
            row, column, start, end = locate(item, M, N, K, share, longer)
            for i in range(SUMS):
                sums[i] = float32(0)
            for _ in range(start, end, int32(BK)):
                for s in range(int32(0), int32(SLICES), int32(UNROLL)):
                    part = int32(s // UNROLL * EACH)
                    copy(shared, next, a, b, ahead, M, N, K, part)
                    first_slice_on(sums, a0, b0, a1, b1, shared, now, y, x, s, 1, lane)
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
            gather(sums)
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
THREE_PRODUCTS_TILES = (
    Tile(128, 128, WN=32, stages=4, blocks=1, tf32=3, flops=0.55e12),
    Tile(64, 64, 32, 32, blocks=4, tf32=3),
)
FP32_TILES = (
    Tile(128, 128, tf32=0, flops=0.40e12),
    Tile(96, 128, WM=48, tf32=0, flops=0.36e12),
    Tile(64, 64, 32, 32, blocks=4, tf32=0),
)  # fmt: skip


def choose(M: int, N: int, K: int, a_m_major: bool, b_m_major: bool, tf32: int) -> tuple[Tile, int]:
    """The tile, and into how many parts to split K: of the large tiles that fit into shared memory what takes the least time; the
    small one, K whole, where none fits or out is small."""
    *tiles, small = {0: FP32_TILES, 1: TF32_TILES, 3: THREE_PRODUCTS_TILES}[tf32]
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
    tf32=1, tile=None, splits=None, stream=0,
):  # fmt: skip
    """out (M,N) = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b is (N,K), or (K,N) if b_m_major. bias: (N,); extra:
    (M,N), what the epilogue reads or writes. tf32, unless a tile says it: how many products of
    TF32 make one product: 0 (fp32 arithmetic), 1 or 3."""
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
