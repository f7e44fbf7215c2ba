"""The engine of versions 13 and 16: wgmma again, fed by a warp that does nothing else, through the tensor memory accelerator.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K)

A block is two warp groups that multiply and one warp, a single thread of it, that asks for tiles (kernels/tma.py). Between them is
a ring of stages, each a step of K of both operands, with two barriers: `full` tells that a stage's bytes are there, `empty` that
all warps have done with it. The producer runs ahead as far as the ring goes, across the borders between tiles of out. Nobody waits
for the whole block.

Two blocks are a cluster: they make tiles of out that lie one below the other, and so share b's tile. Each brings half of it and
sends that to both: L2 has to deliver a third less. A stage is empty when the warps of both have done with it.

The accelerator rounds to TF32 as it copies, so that wgmma may take both operands from shared memory and cut nothing off. If a is
M-major it is read into registers: TF32 wgmma takes K-major tiles only.

b's tile holds its even rows first, then its odd ones. The sums that a lane gets, columns 2 t and 2 t + 1 of 8, then are
columns 4 t to 4 t + 3 of out: 16 bytes.

Three products of TF32 that give fp32's digits (three_products_core in cores.py says how) need the rest of both operands, what a
tensor core does not see of them. Nothing is rounded on the way then. The rest of a is computed in registers, that of b in shared
memory, by the warps that would be idle beside the one that asks for tiles; a third barrier, `rest`, tells that it is there.
"""

import functools
from dataclasses import dataclass

from kernels.device import (
    SIMULATE,
    address,
    big_shared,
    ceil_div,
    cuda,
    float32,
    int32,
    int64,
    keep_compiled,
    ldmatrix_x4,
    load4,
    multiprocessors,
    need,
    scratch,
    store4,
    uint64,
)
from kernels.gelu.gate import gelu_gate
from kernels.intrinsics import ptx
from kernels.matmul.cores import seen
from kernels.matmul.engine import add_splits, best_splits, is_aligned
from kernels.matmul.epilogue import BIAS_GELU, STORE, epilogue_of, finished_of
from kernels.matmul.tiles import BK
from kernels.matmul.wgmma import fence_async, make_wgmma, wgmma_commit, wgmma_fence, wgmma_wait
from kernels.tma import (
    WORDS,
    cluster_rank,
    cluster_sync,
    copy_tile2,
    copy_tile3,
    fence_mbarrier_init,
    give_registers,
    in_clusters,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    take_registers,
    tensor_maps,
)

CLUSTER = 1 if SIMULATE else 2  # blocks
DOWN = 16  # clusters, one below the other, that walk along N together, so that L2 serves them
SHARED = 226 * 1024  # bytes of shared memory that a block can have, less what aligning to 1024 may take


@ptx("{.reg .b32 c; and.b32 c, $1, 0xffffe000; sub.f32 $0, $1, c;}", returns=float32, takes=(float32,))
def rest_at_once(x):
    """x - seen(x). Not called pure: what is pure the compiler computes where it is used, between products that have to come one
    right after the other."""
    return x - seen(x)


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for."""

    BN: int = 256  # columns: 128, 192 or 256
    groups: int = 2  # warp groups, each with 64 rows
    tf32: int = 1  # products that make one: 1, or 3 for the digits of fp32, which takes 128 columns

    @property
    def BM(self) -> int:
        return 64 * self.groups

    @property
    def stage(self) -> int:
        """Floats of a step of both operands, and of the rest of b."""
        return (self.BM + self.BN * (2 if self.tf32 == 3 else 1)) * BK

    @property
    def stages(self) -> int:
        return SHARED // (4 * self.stage)

    @property
    def shared(self) -> int:
        """Bytes of shared memory a block."""
        return 4 * self.stages * self.stage

    @property
    def threads(self) -> int:
        return 128 * self.groups + 128


@functools.cache
def kernel(tile: Tile, a_m_major: bool, epilogue: int, transposed: bool):
    """transposed: out is (N,M), the transpose of what is computed."""
    BM, BN, STAGE, STAGES, THREADS = tile.BM, tile.BN, tile.stage, tile.stages, tile.threads
    THREE = tile.tf32 == 3
    REST_AT, A_AT, BYTES = BN * BK, STAGE - BM * BK, 4 * (BM + BN) * BK
    SUMS, BARRIERS, REST_THREADS = BN // 2, 3 * STAGES, 96
    HALF, WARPS, ALL_RANKS = BN // 2, 4 * tile.groups, 2**CLUSTER - 1
    wgmma, wgmma_shared, wgmma_finish = make_wgmma(BN)
    BELOW = 4 if a_m_major else 8  # rows from a lane's first to its second
    load_bias, load_extra, _ = epilogue_of(epilogue, 1 if transposed else 4, True)
    finished = finished_of(epilogue)

    @cuda.jit(device=True)
    def locate(item, M, N, K, share):
        """Of this item of work: the first row and column of this block's tile, its first step of K, the end of its steps, and
        which part of K that is."""
        across, down = (N + int32(BN - 1)) // int32(BN), (M + int32(CLUSTER * BM - 1)) // int32(CLUSTER * BM)
        part, place = item // (across * down), item % (across * down)
        group, place = place // (int32(DOWN) * across), place % (int32(DOWN) * across)
        height = min(down - group * int32(DOWN), int32(DOWN))
        row = ((group * int32(DOWN) + place % height) * int32(CLUSTER) + cluster_rank()) * int32(BM)
        start = part * share
        end = min(start + share, (K + int32(2 * BK - 1)) // int32(2 * BK) * int32(2 * BK))
        return row, place // height * int32(BN), start, end, part

    @cuda.jit(device=True)
    def next_of(stage, parity):
        """Round the ring; each time round a barrier's phase has the other parity."""
        return (stage + int32(1), parity) if stage < STAGES - 1 else (int32(0), parity ^ int32(1))

    @cuda.jit(device=True)
    def produce(shared, barriers, maps, M, N, K, share, items):
        """One thread brings all tiles of all items."""
        stage, parity, rank = int32(0), int32(1), cluster_rank()
        for item in range(int32(cuda.blockIdx.x) // int32(CLUSTER), items, int32(cuda.gridDim.x) // int32(CLUSTER)):
            row, column, start, end, _ = locate(item, M, N, K, share)
            for k in range(start, end, int32(BK)):
                mbarrier_wait(barriers, STAGES + stage, parity)
                mbarrier_expect(barriers, stage, BYTES)
                at = stage * STAGE
                for half in range(2 // CLUSTER):
                    odd = rank + half
                    copy_tile3(shared, at + odd * (HALF * BK), maps, WORDS, k, odd, column // 2, barriers, stage, ALL_RANKS)
                if a_m_major:
                    for i in range(0, BM, 32):
                        copy_tile2(shared, at + A_AT + i * BK, maps, 0, row + i, k, barriers, stage)
                else:
                    copy_tile2(shared, at + A_AT, maps, 0, k, row, barriers, stage)
                stage, parity = next_of(stage, parity)

    @cuda.jit(device=True)
    def first_row():
        """Of the lane's rows, in the block's tile."""
        lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
        if a_m_major:  # rows dealt so that the reads below do not meet in a bank
            return (warp >> 1) * 32 + (warp & 1) * 8 + (lane >> 4) * 16 + (lane >> 2 & 3)
        return warp * 16 + (lane >> 2)

    @cuda.jit(device=True)
    def read_m_major(fragment, shared, at):
        """Of an M-major tile, 32 x 32 floats one after the other, this lane's elements of four products."""
        t, row = int32(cuda.threadIdx.x) & 3, first_row()
        at += (row >> 5) * (32 * BK) + t * BK + (row & 3)
        for i in range(2):
            for j in range(2):
                start = uint64(at + 4 * j * BK + 4 * ((row >> 2 & 7) ^ t ^ (i + 4 * j)))  # unsigned: none is negative
                for s in range(4):
                    fragment[4 * s + 2 * j + i] = shared[start + uint64(8 * s * BK)]

    @cuda.jit(device=True)
    def read_k_major(fragment, shared, at):
        """The same of a K-major tile."""
        thread = int32(cuda.threadIdx.x)
        row = (thread >> 5 << 4) + (thread & 15)
        for s in range(4):
            x0, x1, x2, x3 = ldmatrix_x4(shared, at + row * BK + 4 * ((2 * s + (thread >> 4 & 1)) ^ (row & 7)))
            fragment[4 * s], fragment[4 * s + 1], fragment[4 * s + 2], fragment[4 * s + 3] = x0, x1, x2, x3

    read_a = read_m_major if a_m_major else read_k_major

    @cuda.jit(device=True)
    def multiply_fragment(sums, a, shared, at, more):
        """The four products of a step, a from registers and b from shared[at:]."""
        wgmma(sums, shared, at, more, a[0], a[1], a[2], a[3])
        for s in range(1, 4):
            wgmma(sums, shared, at + 8 * s, 1, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3])

    @cuda.jit(device=True)
    def write_rest_of_b(shared, barriers, M, N, K, share, items):
        """Three warps write down the rest of every tile of b."""
        stage, parity = int32(0), int32(0)
        thread = int32(cuda.threadIdx.x) - int32(THREADS - REST_THREADS)
        for item in range(int32(cuda.blockIdx.x) // int32(CLUSTER), items, int32(cuda.gridDim.x) // int32(CLUSTER)):
            _, _, start, end, _ = locate(item, M, N, K, share)
            for _ in range(start, end, int32(BK)):
                mbarrier_wait(barriers, stage, parity)
                for i in range(stage * STAGE + 4 * thread, stage * STAGE + REST_AT, 4 * REST_THREADS):
                    x0, x1, x2, x3 = load4(shared, i)
                    store4(shared, i + REST_AT, x0 - seen(x0), x1 - seen(x1), x2 - seen(x2), x3 - seen(x3))
                fence_async()
                mbarrier_arrive(barriers, 2 * STAGES + stage, cluster_rank())
                stage, parity = next_of(stage, parity)

    @cuda.jit(device=True)
    def read_with_rest(a, rest, shared, barriers, stage, parity):
        """The lane's elements of a in this stage, and the rest of each."""
        mbarrier_wait(barriers, stage, parity)
        read_a(a, shared, stage * STAGE + A_AT)
        for i in range(16):
            rest[i] = rest_at_once(a[i])

    @cuda.jit(device=True)
    def multiply_three(sums, a, rest, shared, barriers, stage, parity):
        """Start the twelve products of a step, the small ones first."""
        b = stage * STAGE
        mbarrier_wait(barriers, 2 * STAGES + stage, parity)
        wgmma_fence()
        multiply_fragment(sums, rest, shared, b, 0)
        multiply_fragment(sums, a, shared, b + REST_AT, 1)
        multiply_fragment(sums, a, shared, b, 1)
        wgmma_commit()

    @cuda.jit(device=True)
    def gather(total, sums, barriers, stage):
        """Wait for the products of a step, and add them up as fp32 arithmetic does."""
        wgmma_finish(sums)
        release(barriers, stage)
        for i in range(SUMS):
            total[i] += sums[i]

    @cuda.jit(device=True)
    def multiply(sums, fragment, shared, stage, more):
        """Start the four products of a step."""
        at = stage * STAGE
        if a_m_major:
            read_a(fragment, shared, at + A_AT)
            wgmma_fence()
            multiply_fragment(sums, fragment, shared, at, more)
        else:
            at_a = at + A_AT + (int32(cuda.threadIdx.x) >> 7) * (64 * BK)
            wgmma_fence()
            wgmma_shared(sums, shared, at_a, at, more)
            for s in range(1, 4):
                wgmma_shared(sums, shared, at_a + 8 * s, at + 8 * s, 1)
        wgmma_commit()

    @cuda.jit(device=True)
    def release(barriers, stage):
        """This warp has done with a stage: it tells every block of the cluster."""
        lane = int32(cuda.threadIdx.x) & 31
        if lane < CLUSTER:
            mbarrier_arrive(barriers, STAGES + stage, lane)

    @cuda.jit(device=True)
    def load(b, e, c, bias, extra, row, column, part, M, N):
        """What is added to the sums of columns 32 c to 32 c + 31."""
        for q in range(2):
            n = column + 32 * c + 16 * q
            if not transposed:
                load_bias(b, 4 * q, bias, n, N)
            for i in range(2):
                if transposed:
                    for k in range(4):
                        load_extra(e, 8 * q + 4 * i + k, extra, part * N + n + k, row + BELOW * i, (part + 1) * N, M)
                else:
                    load_extra(e, 8 * q + 4 * i, extra, part * M + row + BELOW * i, n, (part + 1) * M, N)

    @cuda.jit(device=True)
    def put_rows(x, out, row, column, part, M, N):
        """The lane's 16 bytes of two rows and two places, each to out."""
        for q in range(2):
            for i in range(2):
                m, n, k = row + BELOW * i, column + 16 * q, 8 * q + 4 * i
                if m < M and n < N:
                    store4(out, int64(part * M + m) * N + n, x[k], x[k + 1], x[k + 2], x[k + 3])

    @cuda.jit(device=True)
    def put_columns(x, out, row, column, part, M, N):
        for q in range(2):
            for i in range(2):
                for k in range(4):
                    m, n = row + BELOW * i, column + 16 * q + k
                    if m < M and n < N:
                        out[part * N + n, m] = x[8 * q + 4 * i + k]

    put = put_columns if transposed else put_rows

    @cuda.jit(device=True)
    def store(sums, c, b, e, out, extra, row, column, part, M, N):
        """Columns 32 c to 32 c + 31, finished."""
        x = cuda.local.array(16, float32)
        for q in range(2):
            for i in range(2):
                s, k = 4 * (2 * c + q) + 2 * i, 8 * q + 4 * i
                x[k], x[k + 1] = finished(sums[s], b[4 * q], e[k]), finished(sums[s + HALF // 2], b[4 * q + 1], e[k + 1])
                x[k + 2] = finished(sums[s + 1], b[4 * q + 2], e[k + 2])
                x[k + 3] = finished(sums[s + HALF // 2 + 1], b[4 * q + 3], e[k + 3])
        column += 32 * c
        if epilogue == BIAS_GELU:
            put(x, extra, row, column, part, M, N)
            for k in range(16):
                x[k] *= gelu_gate(x[k])
        put(x, out, row, column, part, M, N)

    @cuda.jit(device=True)
    def store_two(sums, c, b0, e0, b1, e1, out, bias, extra, row, column, part, M, N):
        """Store 32 columns and the next 32. What is added to the next ones comes meanwhile. (No loop: if the compiler did not
        unroll it, the sums would have to leave their registers.)"""
        load(b1, e1, c + 1, bias, extra, row, column, part, M, N)
        store(sums, c, b0, e0, out, extra, row, column, part, M, N)
        if 32 * c + 64 < BN:
            load(b0, e0, c + 2, bias, extra, row, column, part, M, N)
        store(sums, c + 1, b1, e1, out, extra, row, column, part, M, N)

    @cuda.jit(device=True)
    def finish(sums, barriers, last, out, bias, extra, row, column, part, M, N):
        """Wait for the last products of a tile, and store it."""
        b0 = cuda.local.array(8, float32)
        b1 = cuda.local.array(8, float32)
        e0 = cuda.local.array(16, float32)
        e1 = cuda.local.array(16, float32)
        row, column = row + first_row(), column + 4 * (int32(cuda.threadIdx.x) & 3)
        load(b0, e0, 0, bias, extra, row, column, part, M, N)
        if not THREE:
            wgmma_finish(sums)
            release(barriers, last)
        store_two(sums, 0, b0, e0, b1, e1, out, bias, extra, row, column, part, M, N)
        store_two(sums, 2, b0, e0, b1, e1, out, bias, extra, row, column, part, M, N)
        if BN > 128:
            store_two(sums, 4, b0, e0, b1, e1, out, bias, extra, row, column, part, M, N)
        if BN > 192:
            store_two(sums, 6, b0, e0, b1, e1, out, bias, extra, row, column, part, M, N)

    @cuda.jit(device=True)
    def consume(shared, barriers, out, bias, extra, M, N, K, share, items):
        """A warp group makes its 64 rows of every tile of out."""
        sums = cuda.local.array(SUMS, float32)
        even = cuda.local.array(16, float32)  # fragments of a by turns: wgmma still reads the one while the other is loaded
        odd = cuda.local.array(16, float32)
        stage, parity, last = int32(0), int32(0), int32(0)
        first, step = int32(cuda.blockIdx.x) // int32(CLUSTER), int32(cuda.gridDim.x) // int32(CLUSTER)
        row, column, start, end, part = locate(first, M, N, K, share)
        for item in range(first, items, step):
            for k in range(start, end, int32(2 * BK)):
                mbarrier_wait(barriers, stage, parity)
                multiply(sums, even, shared, stage, int32(k > start))
                wgmma_wait(1)
                if k > start:
                    release(barriers, last)
                last = stage
                stage, parity = next_of(stage, parity)
                mbarrier_wait(barriers, stage, parity)
                multiply(sums, odd, shared, stage, 1)
                wgmma_wait(1)
                release(barriers, last)
                last = stage
                stage, parity = next_of(stage, parity)
            row_now, column_now, part_now = row, column, part
            row, column, start, end, part = locate(item + step, M, N, K, share)  # while the last products are under way
            finish(sums, barriers, last, out, bias, extra, row_now, column_now, part_now, M, N)

    @cuda.jit(device=True)
    def consume_three(shared, barriers, out, bias, extra, M, N, K, share, items):
        """The same with three products for each. While they are under way, a's elements of the next step are read."""
        total = cuda.local.array(SUMS, float32)
        sums = cuda.local.array(SUMS, float32)
        even = cuda.local.array(16, float32)
        even_rest = cuda.local.array(16, float32)
        odd = cuda.local.array(16, float32)
        odd_rest = cuda.local.array(16, float32)
        stage, parity = int32(0), int32(0)
        for item in range(int32(cuda.blockIdx.x) // int32(CLUSTER), items, int32(cuda.gridDim.x) // int32(CLUSTER)):
            row, column, start, end, part = locate(item, M, N, K, share)
            for i in range(SUMS):
                total[i] = float32(0)
            read_with_rest(even, even_rest, shared, barriers, stage, parity)
            for k in range(start, end, int32(2 * BK)):
                next, next_parity = next_of(stage, parity)
                multiply_three(sums, even, even_rest, shared, barriers, stage, parity)
                read_with_rest(odd, odd_rest, shared, barriers, next, next_parity)
                gather(total, sums, barriers, stage)
                stage, parity = next_of(next, next_parity)
                multiply_three(sums, odd, odd_rest, shared, barriers, next, next_parity)
                if k + int32(2 * BK) < end:
                    read_with_rest(even, even_rest, shared, barriers, stage, parity)
                gather(total, sums, barriers, next)
            finish(total, barriers, stage, out, bias, extra, row, column, part, M, N)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def matmul_tma_kernel(out, maps, bias, extra, M, N, K, share, items):
        """out (M,N), or (N,M) if transposed, one below the other for each part of K. maps: the tensor maps of a and b. An item of
        work is a tile of out for each block of a cluster, and `share` steps of K, an even number of times BK."""
        in_clusters(CLUSTER)
        shared = cuda.shared.array(0, float32, alignment=1024)
        barriers = cuda.shared.array(BARRIERS, uint64)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(STAGES):
                mbarrier_init(barriers, stage, 1)
                mbarrier_init(barriers, STAGES + stage, CLUSTER * WARPS)
                mbarrier_init(barriers, 2 * STAGES + stage, REST_THREADS)
            fence_mbarrier_init()
        cluster_sync()
        if thread < 32 * WARPS:
            take_registers(224)
            if THREE:
                consume_three(shared, barriers, out, bias, extra, M, N, K, share, items)
            else:
                consume(shared, barriers, out, bias, extra, M, N, K, share, items)
        else:
            give_registers(56)
            if thread == 32 * WARPS:
                produce(shared, barriers, maps, M, N, K, share, items)
            elif THREE and thread >= THREADS - REST_THREADS:
                write_rest_of_b(shared, barriers, M, N, K, share, items)
        cuda.syncwarp()
        cluster_sync()  # no block leaves while the other may still send to it

    return keep_compiled(matmul_tma_kernel, tile, a_m_major, epilogue, transposed)


def choose(M: int, N: int, K: int, tf32: int) -> tuple[Tile, int]:
    """The tile, and into how many parts to split K."""
    rates = {128: 0.78e12} if tf32 == 3 else {256: 2.7e12, 192: 2.45e12, 128: 1.85e12}  # FLOPs a second of a multiprocessor
    rows = ceil_div(M, 256) * 256
    timed = {BN: best_splits(rows, N, K, 128, BN, rate) for BN, rate in rates.items()}
    BN = min(timed, key=timed.get)
    return Tile(BN, tf32=tf32), timed[BN][1]


def multiply(
    out, a, b, *, a_m_major=False, transposed=False, epilogue=STORE, bias=None, extra=None,
    tf32=1, tile=None, splits=None, stream=0,
):  # fmt: skip
    """out (M,N), or (N,M) if transposed, = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b.T is (N,K). bias: (N,), not if
    transposed; extra: like out, what the epilogue reads or writes. tf32, unless a tile says it: how many products of TF32
    make one product, 1 or 3.
    Raises ShapeError unless rows and channels are multiples of 4."""
    M, K = a.shape[::-1] if a_m_major else a.shape
    N = b.shape[0]
    bias, extra = out if bias is None else bias, out if extra is None else extra
    need(is_aligned(out, a, b, extra, bias) and N % 4 == 0, "needs channels in multiples of 4, in arrays aligned to 16 bytes")
    chosen, parts = choose(M, N, K, tf32)
    tile, splits = tile or chosen, splits or parts
    share = ceil_div(ceil_div(K, splits), 2 * BK) * 2 * BK
    splits = ceil_div(K, share)
    rows, columns = out.shape
    target, how = (out, epilogue) if splits == 1 else (scratch("matmul parts", (splits * rows, columns)), STORE)
    rounded = tile.tf32 == 1
    maps = tensor_maps(
        (address(a), a.shape[::-1], (a.shape[1],), (32, 32 if a_m_major else tile.BM), rounded),
        (address(b), (K, 2, N // 2), (K, 2 * K), (BK, 1, tile.BN // 2), rounded),
    )
    items = ceil_div(M, CLUSTER * tile.BM) * ceil_div(N, tile.BN) * splits
    blocks = min(items, multiprocessors() // CLUSTER) * CLUSTER
    launch = big_shared(kernel(tile, a_m_major, how, transposed), blocks, tile.threads, stream, tile.shared)
    launch(target, maps, bias, extra, int32(M), int32(N), int32(K), int32(share), int32(items))
    if splits > 1:
        grid = ceil_div(rows * columns // 4, 256)
        add = add_splits(epilogue, True)
        add[grid, 256, stream](out, target, bias, extra, int32(rows), int32(columns), int32(splits))
