"""The engine of version 12: Hopper's tensor cores, which four warps use together and which read b from shared memory themselves.

    out (M,N) = a @ b, where a is (M,K) or, if a_m_major, (K,M) read as its transpose; and b.T is (N,K)

wgmma.mma_async.m64nBNk8 adds a 64 x 8 by 8 x BN product to sums in the registers of a warp group, 128 threads. It takes a from
registers, so that a may lie either way round and is rounded to nearest; b it reads from shared memory, K-major, cut off to TF32.
It runs on while its warps go on: to the next fragments of a, and to the copies of the stages that come after.

A block takes one tile of out after the other, and the copies run two steps ahead across their borders: while the last sums of a
tile are stored, the first steps of the next are on their way.
"""

import functools
from dataclasses import dataclass

import numpy as np

from kernels import simulator
from kernels.device import (
    SIMULATE,
    big_shared,
    ceil_div,
    compute_capability,
    cp_async16,
    cp_async16_zfill,
    cp_async_commit,
    cp_async_wait,
    cuda,
    float32,
    int32,
    int64,
    keep_compiled,
    ldmatrix_x4,
    multiprocessors,
    need,
    scratch,
)  # fmt: skip
from kernels.intrinsics import LITERAL, ptx
from kernels.matmul.cores import round_tf32
from kernels.matmul.engine import GROUP, add_splits, best_splits, is_aligned
from kernels.matmul.epilogue import STORE, epilogue_of
from kernels.matmul.tiles import BK, PAD

STAGES = 4


def missing() -> str | None:
    """Why wgmma cannot be used here, in a sentence; None where it can. Blackwell has another instruction in its place."""
    major = compute_capability()[0]
    return None if major == 9 else f"needs compute capability 9, Hopper's, for wgmma; this card has {major}"


@dataclass(frozen=True)
class Tile:
    """Sizes that a kernel is compiled for."""

    groups: int = 2  # warp groups, each with 64 rows
    BN: int = 192  # columns, a multiple of 64 and at most 256

    @property
    def BM(self) -> int:
        return 64 * self.groups

    def size_a(self, m_major: bool) -> int:
        """Floats of a stage of a's tile: whole kilobytes, so that b's tiles start at one."""
        return ceil_div(BK * (self.BM + PAD if m_major else self.BM), 256) * 256

    def shared(self, a_m_major: bool) -> int:
        """Bytes of shared memory a block."""
        return 4 * STAGES * (self.size_a(a_m_major) + self.BN * BK)


@ptx("fence.proxy.async.shared::cta;")
def fence_async():
    """What this thread has written to shared memory, wgmma sees from here on (after a barrier). (PTX ISA, async proxy)"""


@ptx("wgmma.fence.sync.aligned;")
def wgmma_fence():
    """Before the first wgmma that uses registers which were just written. (PTX ISA, wgmma.fence)"""


@ptx("wgmma.commit_group.sync.aligned;")
def wgmma_commit():
    """Bind the wgmmas since the last commit into a group. (PTX ISA, wgmma.commit_group)"""


@ptx("wgmma.wait_group.sync.aligned $0;", takes=(LITERAL,))
def wgmma_wait(n):
    """Wait until at most n groups are under way. (PTX ISA, wgmma.wait_group)"""


@functools.cache
def make_wgmma(N: int):
    """Three functions of a warp group. wgmma(sums, shared, at, more, a0, a1, a2, a3): sums (N // 2) = a @ b, plus sums if `more`;
    wgmma_shared(sums, shared, at_a, at, more): the same with a in shared memory too; wgmma_finish(sums): wait until the sums are
    there.

    b.T's N rows of 8 floats start at shared[at], in a tile with rows of 128 bytes whose 16-byte chunk c stands at c ^ (row % 8);
    at is a multiple of 8 within a row, and the tile starts at a multiple of 1024 bytes. So do a's 64 rows at shared[at_a], or
    lane 4 g + t of warp w holds
        a0 = a[16 w + g, t], a1 = a[16 w + g + 8, t], a2 = a[16 w + g, t + 4], a3 = a[16 w + g + 8, t + 4]
    and in either case
        sums[4 j + c] = sums[16 w + g + 8 (c // 2), 8 j + 2 t + c % 2]
    (PTX ISA, Asynchronous Warpgroup Level Matrix Instructions)
    """
    count = N // 2
    if SIMULATE:
        return simulated_wgmma(count)

    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    def assembly(a: str, operands: int) -> str:
        """The instruction whose last operands are b's address and `more`, after `operands` of a, which it calls `a`."""
        sums = ", ".join(f"${i}" for i in range(count))
        b, more = (f"${2 * count + operands + i}" for i in range(2))
        return (
            f"{{.reg .pred p; .reg .b32 x; .reg .b64 d, e; setp.ne.b32 p, {more}, 0; {descriptor('d', b)}"
            f"{descriptor('e', f'${2 * count}') if operands == 1 else ''}"
            f"wgmma.mma_async.sync.aligned.m64n{N}k8.f32.tf32.tf32 {{{sums}}}, {a}, d, p, 1, 1;}}"
        )

    def descriptor(name: str, address: str) -> str:
        """Address / 16, 1024 bytes between groups of eight rows, swizzled by 128 bytes."""
        return f"shr.u32 x, {address}, 4; cvt.u64.u32 {name}, x; or.b64 {name}, {name}, 0x4000004000010000; "

    from_registers = assembly("{" + ", ".join(f"${2 * count + i}" for i in range(4)) + "}", 4)
    from_shared = assembly("e", 1)

    def address(context, builder, array, value, i):
        start = builder.gep(context.make_array(array)(context, builder, value).data, [i])
        return builder.ptrtoint(builder.addrspacecast(start, ir.PointerType(start.type.pointee, 3)), ir.IntType(32))

    def through_registers(context, builder, sums, value, text, operands):
        """The assembly with all sums in registers, which it changes in place."""
        data = context.make_array(sums)(context, builder, value).data
        places = [builder.gep(data, [ir.Constant(ir.IntType(64), i)]) for i in range(count)]
        constraints = ["=f"] * count + [str(i) for i in range(count)] + ["r"] * len(operands) + ["~{memory}"]
        operands = [*map(builder.load, places), *operands]
        result = ir.LiteralStructType([ir.FloatType()] * count)
        function = ir.FunctionType(result, [operand.type for operand in operands])
        values = builder.call(ir.InlineAsm(function, text, ",".join(constraints), side_effect=True), operands)
        for i, place in enumerate(places):
            builder.store(builder.extract_value(values, i), place)
        return context.get_dummy_value()

    @intrinsic
    def wgmma(typing_context, sums, shared, at, more, a0, a1, a2, a3):
        def generate(context, builder, signature, args):
            a = [builder.bitcast(x, ir.IntType(32)) for x in args[4:]]
            b = address(context, builder, shared, *args[1:3])
            return through_registers(context, builder, sums, args[0], from_registers, [*a, b, args[3]])

        return types.none(sums, shared, types.int64, types.int32, *[types.float32] * 4), generate

    @intrinsic
    def wgmma_shared(typing_context, sums, shared, at_a, at, more):
        def generate(context, builder, signature, args):
            a, b = (address(context, builder, shared, args[1], i) for i in args[2:4])
            return through_registers(context, builder, sums, args[0], from_shared, [a, b, args[4]])

        return types.none(sums, shared, types.int64, types.int64, types.int32), generate

    @intrinsic
    def wgmma_finish(typing_context, sums):
        def generate(context, builder, signature, args):
            return through_registers(context, builder, sums, args[0], "wgmma.wait_group.sync.aligned 0;", [])

        return types.none(sums), generate

    return wgmma, wgmma_shared, wgmma_finish


def simulated_wgmma(count: int):
    def rows_of_8(shared, at, rows):
        """As wgmma reads them."""
        tile = np.asarray(shared)[at - at % BK :][: rows * BK].reshape(rows, 8, 4)
        chunks = (at % BK // 4 + np.arange(2))[None, :] ^ (np.arange(rows) % 8)[:, None]
        return np.take_along_axis(tile, chunks[:, :, None], 1).reshape(rows, 8)

    def held(group):
        """What the lanes of a warp group hold of a."""
        a = np.empty((64, 8), np.float32)
        for thread, *values in list(group.values()):
            w, g, t = thread // 32 % 4, thread % 32 // 4, thread % 4
            a[16 * w + g, t], a[16 * w + g + 8, t], a[16 * w + g, t + 4], a[16 * w + g + 8, t + 4] = values
        return a

    def add_product(sums, group, thread, a, shared, at, more):
        if "product" not in group:
            cut = (x.view(np.uint32) & np.uint32(0xFFFFE000) for x in (a(), rows_of_8(shared, at, 2 * count)))
            a, b = (x.view(np.float32).astype(np.float64) for x in cut)
            group["product"] = (a @ b.T).astype(np.float32)
        w, g, t = thread // 32 % 4, thread % 32 // 4, thread % 4
        for i in range(count):
            sums[i] = (sums[i] if more else 0) + group["product"][16 * w + g + 8 * (i % 4 // 2), i // 4 * 8 + 2 * t + i % 2]

    def wgmma(sums, shared, at, more, a0, a1, a2, a3):
        thread = int(cuda.threadIdx.x)
        group = simulator.barrier(f"wgmma {thread // 128}", 128, (thread, a0, a1, a2, a3))
        add_product(sums, group, thread, lambda: held(group), shared, at, more)

    def wgmma_shared(sums, shared, at_a, at, more):
        thread = int(cuda.threadIdx.x)
        group = simulator.barrier(f"wgmma {thread // 128}", 128)
        add_product(sums, group, thread, lambda: rows_of_8(shared, at_a, 64), shared, at, more)

    return wgmma, wgmma_shared, lambda sums: None


@functools.cache
def kernel(tile: Tile, a_m_major: bool, epilogue: int, transposed: bool):
    """transposed: out is (N,M), the transpose of what is computed."""
    BM, BN, THREADS = tile.BM, tile.BN, 128 * tile.groups
    A_AT, A_ROW = BN * BK, BM + PAD  # b's tile first: it has to start at a multiple of 1024 bytes
    STAGE, SUMS, AHEAD = A_AT + tile.size_a(a_m_major), BN // 2, STAGES - 3
    ROWS = THREADS // 8  # of a K-major tile a pass
    STEPS = THREADS * 4 // BM  # of an M-major tile a pass
    wgmma, _, wgmma_finish = make_wgmma(BN)
    WIDE = 2 if transposed else 1
    QUARTER, QUARTER2 = BN // 16, BN // 8
    load_bias, load_extra, store = epilogue_of(epilogue, 1 if transposed else 2, True)

    @cuda.jit(device=True)
    def copy_rows(shared, at, source, first, k, count, K, end, rows):
        """Of source (count, K), `rows` rows from `first` on, as wgmma and ldmatrix want them: chunk c of a row at c ^ (row % 8)."""
        thread = int32(cuda.threadIdx.x)
        row, chunk = thread >> 3, thread & 7
        start = int64(first + row) * K + (k + 4 * chunk)
        to = at + row * BK + 4 * (chunk ^ (row & 7))
        inside = first + rows <= count and k + BK <= end
        for i in range(0, rows, ROWS):
            if inside:
                if rows % ROWS == 0 or i + row < rows:
                    cp_async16(shared, to + i * BK, source, start + i * K)
            elif rows % ROWS == 0 or i + row < rows:
                valid = first + row + i < count and k + 4 * chunk < end
                cp_async16_zfill(shared, to + i * BK, source, start + i * K, valid)

    @cuda.jit(device=True)
    def copy_columns(shared, at, source, first, k, count, end):
        """Of source (K, count), BM columns from `first` on."""
        thread = int32(cuda.threadIdx.x)
        step, column = thread // (BM // 4), thread % (BM // 4) * 4
        start = int64(k + step) * count + (first + column)
        for i in range(0, BK, STEPS):
            valid = k + step + i < end and first + column < count
            cp_async16_zfill(shared, at + (step + i) * A_ROW + column, source, start + i * count, valid)

    @cuda.jit(device=True)
    def copy(shared, stage, a, b, row, column, k, M, N, K, end):
        """Start the copies of one step of both operands."""
        if a_m_major:
            copy_columns(shared, stage + A_AT, a, row, k, M, end)
        else:
            copy_rows(shared, stage + A_AT, a, row, k, M, K, end, BM)
        copy_rows(shared, stage, b, column, k, N, K, end, BN)
        cp_async_commit()

    @cuda.jit(device=True)
    def read_a(fragment, shared, at, s):
        """Rounded, this warp's 16 rows of 8 steps of K."""
        thread = int32(cuda.threadIdx.x)
        lane, row = thread & 31, thread >> 5 << 4
        if a_m_major:
            start = at + (8 * s + (lane & 3)) * A_ROW + row + (lane >> 2)
            x0, x1 = shared[start], shared[start + 8]
            x2, x3 = shared[start + 4 * A_ROW], shared[start + 4 * A_ROW + 8]
        else:
            r = row + (lane & 15)
            x0, x1, x2, x3 = ldmatrix_x4(shared, at + r * BK + 4 * ((2 * s + (lane >> 4)) ^ (r & 7)))
        fragment[4 * s], fragment[4 * s + 1] = round_tf32(x0), round_tf32(x1)
        fragment[4 * s + 2], fragment[4 * s + 3] = round_tf32(x2), round_tf32(x3)

    @cuda.jit(device=True)
    def multiply(sums, fragment, shared, stage, more):
        """Start the four products of a step."""
        for s in range(4):
            read_a(fragment, shared, stage + A_AT, s)
        wgmma_fence()
        wgmma(sums, shared, stage, more, fragment[0], fragment[1], fragment[2], fragment[3])
        for s in range(1, 4):
            at = 4 * s
            wgmma(sums, shared, stage + 8 * s, 1, fragment[at], fragment[at + 1], fragment[at + 2], fragment[at + 3])
        wgmma_commit()

    @cuda.jit(device=True)
    def locate(item, M, N, K, share):
        """Of this item of work: the first row and column of its tile, its first step of K, and the end of its steps. After the
        last item: a place where there is nothing to copy."""
        across, down = (N + int32(BN - 1)) // int32(BN), (M + int32(BM - 1)) // int32(BM)
        split, block = item // (across * down), item % (across * down)
        top = block // (GROUP * across) * GROUP
        height = min(down - top, GROUP)
        row = (top + block % (GROUP * across) % height) * BM
        column = block % (GROUP * across) // height * BN
        start = split * share
        return (row, column, start, min(start + share, K)) if start < K else (M, N, start, start)

    @cuda.jit(device=True)
    def store_quarter(sums, first, out, bias, extra, row, column, part, M, N):
        """A quarter of the sums: loops short enough for the compiler to unroll, or the sums would leave their registers."""
        b = cuda.local.array(QUARTER, float32)
        e = cuda.local.array(QUARTER2, float32)
        if transposed:
            rows, columns, row0, column0 = part + N, M, part + column, row
        else:
            rows, columns, row0, column0 = part + M, N, part + row, column
        for j in range(BN // 32):
            n = 8 * (first + j)
            if not transposed:
                load_bias(b, 2 * j, bias, column0 + n, columns)
            for i in range(2):
                for c in range(WIDE):
                    at = 4 * j + 2 * i + c
                    if transposed:
                        load_extra(e, at, extra, row0 + n + c, column0 + 8 * i, rows, columns)
                    else:
                        load_extra(e, at, extra, row0 + 8 * i, column0 + n, rows, columns)
        for j in range(BN // 32):
            n = 8 * (first + j)
            for i in range(2):
                at, c = 4 * j + 2 * i, 4 * (first + j) + 2 * i
                if transposed:
                    store(out, extra, row0 + n, column0 + 8 * i, rows, columns, (sums[c],), (b[0],), (e[at],))
                    store(out, extra, row0 + n + 1, column0 + 8 * i, rows, columns, (sums[c + 1],), (b[0],), (e[at + 1],))
                else:
                    store(
                        out, extra, row0 + 8 * i, column0 + n, rows, columns,
                        (sums[c], sums[c + 1]), (b[2 * j], b[2 * j + 1]), (e[at], e[at + 1]),
                    )  # fmt: skip

    @cuda.jit(device=True)
    def store_sums(sums, out, bias, extra, row, column, part, M, N):
        lane, warp = int32(cuda.threadIdx.x) & 31, int32(cuda.threadIdx.x) >> 5
        row, column = row + 16 * warp + (lane >> 2), column + 2 * (lane & 3)
        store_quarter(sums, 0, out, bias, extra, row, column, part, M, N)
        store_quarter(sums, BN // 32, out, bias, extra, row, column, part, M, N)
        store_quarter(sums, BN // 16, out, bias, extra, row, column, part, M, N)
        store_quarter(sums, 3 * BN // 32, out, bias, extra, row, column, part, M, N)

    @cuda.jit(fastmath=True, launch_bounds=(THREADS, 1))
    def matmul_wgmma_kernel(out, a, b, bias, extra, M, N, K, share, items):
        """out (M,N), or (N,M) if transposed, one below the other for each part of K. An item of work is a tile of out and `share`
        steps of K, an even number of times BK."""
        shared = cuda.shared.array(0, float32, alignment=1024)
        sums = cuda.local.array(SUMS, float32)
        even = cuda.local.array(16, float32)  # fragments of a by turns: wgmma still reads the one while the other is loaded
        odd = cuda.local.array(16, float32)
        blocks = int32(cuda.gridDim.x)
        now, next = int32(0), int32(0)
        item_ahead = int32(cuda.blockIdx.x)
        row_ahead, column_ahead, k_ahead, end_ahead = locate(item_ahead, M, N, K, share)
        for _ in range(STAGES - 2):
            copy(shared, next, a, b, row_ahead, column_ahead, k_ahead, M, N, K, end_ahead)
            next += STAGE
            k_ahead += BK  # both are copies of the first item, which has two steps at least, be they zeros
        if k_ahead >= end_ahead:
            item_ahead += blocks
            row_ahead, column_ahead, k_ahead, end_ahead = locate(item_ahead, M, N, K, share)
        for item in range(int32(cuda.blockIdx.x), items, blocks):
            row, column, start, end = locate(item, M, N, K, share)
            for k in range(start, end, int32(2 * BK)):
                cp_async_wait(AHEAD)
                fence_async()
                cuda.syncthreads()  # this step's tiles are there; all have done the step before last, whose place is free
                multiply(sums, even, shared, now, int32(k > start))
                copy(shared, next, a, b, row_ahead, column_ahead, k_ahead, M, N, K, end_ahead)
                wgmma_wait(1)
                cp_async_wait(AHEAD)
                fence_async()
                cuda.syncthreads()
                multiply(sums, odd, shared, now + STAGE, 1)
                copy(shared, next + STAGE, a, b, row_ahead, column_ahead, k_ahead + BK, M, N, K, end_ahead)
                wgmma_wait(1)
                now, next = next, now
                k_ahead += 2 * BK
                if k_ahead >= end_ahead:
                    item_ahead += blocks
                    row_ahead, column_ahead, k_ahead, end_ahead = locate(item_ahead, M, N, K, share)
            wgmma_finish(sums)
            store_sums(sums, out, bias, extra, row, column, start // share * (N if transposed else M), M, N)

    return keep_compiled(matmul_wgmma_kernel, tile, a_m_major, epilogue, transposed)


def multiply(
    out, a, b, *, a_m_major=False, transposed=False, epilogue=STORE, bias=None, extra=None, tile=Tile(), splits=None, stream=0
):  # fmt: skip
    """out (M,N), or (N,M) if transposed, = epilogue(a @ b): a is (M,K), or (K,M) if a_m_major; b.T is (N,K). bias: (N,), not if
    transposed; extra: like out, what the epilogue reads or writes. Raises ShapeError unless M, N, K are multiples of 4."""
    M, K = a.shape[::-1] if a_m_major else a.shape
    N = b.shape[0]
    bias, extra = out if bias is None else bias, out if extra is None else extra
    need(is_aligned(out, a, b, extra, bias), "needs channels in multiples of 4, in arrays aligned to 16 bytes")
    splits = splits or best_splits(M, N, K, tile.BM, tile.BN, 1.9e12)[1]
    share = ceil_div(ceil_div(K, splits), 2 * BK) * 2 * BK
    splits = ceil_div(K, share)
    rows, columns = out.shape
    target, how = (out, epilogue) if splits == 1 else (scratch("matmul parts", (splits * rows, columns)), STORE)
    items = ceil_div(M, tile.BM) * ceil_div(N, tile.BN) * splits
    run = kernel(tile, a_m_major, how, transposed)
    launch = big_shared(run, min(items, multiprocessors()), 128 * tile.groups, stream, tile.shared(a_m_major))
    launch(target, a, b, bias, extra, int32(M), int32(N), int32(K), int32(share), int32(items))
    if splits > 1:
        grid = ceil_div(rows * columns // 4, 256)
        add = add_splits(epilogue, True)
        add[grid, 256, stream](out, target, bias, extra, int32(rows), int32(columns), int32(splits))
